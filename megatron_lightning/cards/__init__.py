"""``megatron-lightning verify-card``: what holds for a model's folder, with the command that shows
it again. The header and the reader of every kept record are here, too.
"""
