"""``megatron-lightning verify-card``: verified claims about a model's folder, each with the
command to verify again. The header and the reader of every kept record are here, too.
"""
