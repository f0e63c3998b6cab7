"""``megatron-lightning doctor``: check that a machine or a job is ready to train.

versions   packages, devices, backends, Transformer Engine
launch     this process among the ranks of the launcher at hand
links      a self-test of the collectives, axis by axis
machine    speed of every rank's device, and the variables that matter
folder     the file system of the checkpoints
command    all checks as one report
"""
