"""A command of Megatron-LM's ``pretrain_gpt.py`` as a configuration file."""
