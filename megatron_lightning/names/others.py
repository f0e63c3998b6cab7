"""Commands, classes, functions, tokenizer types, and arguments of NeMo's ``MegatronStrategy``.

Rows are as in ``options``: ``old name | here | note``. Names here are bare, so that a row reads
as the answer's words.
"""

from __future__ import annotations

COMMANDS = """
pretrain | fit
finetune | fit | with --data=FinetuneDataModule
train | fit
launch | fit | started by itself, by torchrun or by srun
run_recipe | fit --config NAME | recipe list prints the names
distill | fit --model=DistillationModule
quantize | - | quantized weights come from a fit with a recipe; convert export writes them
prune | convert prune | by the statistics of LayerStatistics
export | convert export
import | convert import
convert_checkpoint | convert import, convert export
merge_datasets | data merge
preprocess_data | preprocess
report_theoretical_memory | plan
inference | generate
text_generation_server | serve
run_text_generation_server | serve
"""

ATTRIBUTES = """
initialize_model_parallel | ParallelContext | MegatronStrategy makes one
destroy_model_parallel | ParallelContext | the Trainer ends its groups
model_parallel_is_initialized | trainer.strategy.context
get_tensor_model_parallel_rank | trainer.strategy.context.tp.rank
get_tensor_model_parallel_world_size | trainer.strategy.context.tp.size
get_tensor_model_parallel_group | trainer.strategy.context.tp.group
get_pipeline_model_parallel_rank | trainer.strategy.context.pp.rank
get_pipeline_model_parallel_world_size | trainer.strategy.context.pp.size
get_pipeline_model_parallel_group | trainer.strategy.context.pp.group
get_context_parallel_rank | trainer.strategy.context.cp.rank
get_context_parallel_world_size | trainer.strategy.context.cp.size
get_context_parallel_group | trainer.strategy.context.cp.group
get_data_parallel_rank | trainer.strategy.context.dp.rank
get_data_parallel_world_size | trainer.strategy.context.dp.size
get_data_parallel_group | trainer.strategy.context.dp.group
get_expert_model_parallel_rank | trainer.strategy.context.ep.rank
get_expert_model_parallel_world_size | trainer.strategy.context.ep.size
get_expert_model_parallel_group | trainer.strategy.context.ep.group
is_pipeline_first_stage | trainer.strategy.context.pp
is_pipeline_last_stage | trainer.strategy.context.pp
parallel_state | trainer.strategy.context
model_parallel_cuda_manual_seed | seed_everything
get_forward_backward_func | strategies.run_pipeline | MegatronStrategy runs the schedule
ModuleSpec | parallel.ShardingPlan | a model is plain PyTorch
get_gpt_layer_local_spec | models.GPTModel | a model is plain PyTorch
get_gpt_layer_with_transformer_engine_spec | models.GPTModel | a model is plain PyTorch
ModelParallelConfig | strategies.MegatronStrategy
MLATransformerConfig | models.TransformerConfig | with mla
DistributedDataParallel | strategies.MegatronStrategy | data_parallel="ddp"
DistributedDataParallelConfig | config.DataParallelOptions
OptimizerConfig | modules.GPTLightningModule | learning_rate, betas, weight_decay
get_megatron_optimizer | optim.DistributedOptimizer | configure_optimizers returns torch's optimizer
OptimizerParamScheduler | optim.ScheduledLR
print_rank_0 | lightning.pytorch.utilities.rank_zero_info
get_args | trainer.strategy.options
get_timers | callbacks.StageTimers
Timers | callbacks.StageTimers
StragglerDetector | callbacks.StragglerMonitor
save_checkpoint | trainer.save_checkpoint
load_checkpoint | trainer.fit(ckpt_path=...)
dist_checkpointing | checkpoint
GPTDatasetConfig | modules.PretrainDataModule
BlendedMegatronDatasetBuilder | modules.PretrainDataModule
MockGPTDataset | modules.PretrainDataModule | mock=True
FIMDataset | modules.PretrainDataModule | fim_rate
SFTDataset | modules.FinetuneDataModule
build_tokenizer | modules.PretrainDataModule | tokenizer_model and tokenizer_type
inprocess_restart | resilience.Restarts
FullyShardedDataParallel | strategies.MegatronStrategy | data_parallel="fsdp"
to_megatron_provider | to_module | a LightningModule; to_model returns the model
to_megatron_model | to_model
provide_distributed_model | to_module | the Trainer divides it
MegatronModelBridge | bridge.family_rules.family.Family
MegatronMappingRegistry | bridge.family_rules.family.Family
ConfigContainer | configs are YAML files: recipe list
DoRA | peft.LoRA | use_dora=True
CanonicalLoRA | peft.LoRA | fused="parts", the default
MegatronOptimizerModule | modules.GPTLightningModule
MegatronMixedPrecision | strategies.MegatronMixedPrecision
MegatronParallel | strategies.MegatronStrategy
FSDP2Strategy | strategies.MegatronStrategy | data_parallel="fsdp"
MaskedTokenLossReduction | an ordinary training_step returns the loss
MegatronLossReduction | an ordinary training_step returns the loss
PreTrainingDataModule | modules.PretrainDataModule
MockDataModule | modules.PretrainDataModule | mock=True
FineTuningDataModule | modules.FinetuneDataModule
ChatDataModule | modules.FinetuneDataModule
HFAutoModelForCausalLM | modules.HuggingFaceModule
PreemptionCallback | callbacks.RescueCheckpoint
TimingCallback | callbacks.ThroughputMonitor
FLOPsMeasurementCallback | callbacks.ThroughputMonitor
GarbageCollectionCallback | callbacks.GarbageCollection
NsysCallback | callbacks.ProfilerWindow | nvtx=True
MemoryProfileCallback | callbacks.MemorySnapshot
DDPParityChecker | always
AutoResume | trainer.fit(ckpt_path="last")
NeMoLogger | loggers of Lightning
"""

ARGUMENTS = """
use_distributed_optimizer | data_parallel = zero1 | the default
ddp | data_parallel, data_parallel_options
fsdp | data_parallel = fsdp
overlap_grad_reduce | always
overlap_param_gather | data_parallel_options | DataParallelOptions(overlap_param_gather=True)
grad_reduce_in_fp32 | data_parallel_options | DataParallelOptions(grad_reduce_in_bf16=...)
num_distributed_optimizer_instances | data_parallel_options
num_layers_per_virtual_pipeline_stage | virtual_pipeline_model_parallel_size
num_layers_in_first_pipeline_stage | pipeline_options
num_layers_in_last_pipeline_stage | pipeline_options
account_for_embedding_in_pipeline_split | pipeline_options
account_for_loss_in_pipeline_split | pipeline_options
microbatch_group_size_per_vp_stage | pipeline_options
pipeline_model_parallel_layout | pipeline_options
cp_comm_type | context_options
recompute_granularity | recompute
ckpt_async_save | checkpoint_options | CheckpointOptions(async_save=True)
ckpt_load_strictness | strict_loading of the LightningModule
ckpt_load_optimizer | init_from_hf of the module
restore_config | init_from_hf of the module
ckpt_save_optimizer | - | a checkpoint resumes the run
save_ckpt_format | always
ckpt_parallel_save | always
ckpt_parallel_load | always
lazy_init | always
setup_optimizers | always
init_model_parallel | always
pipeline_dtype | precision of the Trainer
precision_plugin | precision of the Trainer
data_sampler | micro_batch_size | global_batch_size of the data module
global_batch_size | global_batch_size of the data module
replace_progress_bar | always
progress_interval | log_every_n_steps of the Trainer
megatron_log_level | callbacks.StageTimers
cluster_environment | plugins of the Trainer
checkpoint_io | plugins of the Trainer
accelerator | accelerator of the Trainer
parallel_devices | devices of the Trainer
find_unused_parameters | always
use_gloo_process_groups | process_group_backend
use_te_rng_tracker | - | random draws have their own streams
use_sharp | - | set NCCL's own variables
use_tp_pp_dp_mapping | - | ranks have one order, tp-cp-ep-dp-pp
moe_extended_tp | expert_tensor_parallel_size
encoder_tensor_model_parallel_size | - | encoder and decoder share one layout
encoder_pipeline_model_parallel_size | - | encoder and decoder share one layout
"""

TOKENIZER_TYPES = """
SentencePieceTokenizer | sentencepiece
GPTSentencePieceTokenizer | sentencepiece
Llama2Tokenizer | sentencepiece
HuggingFaceTokenizer | huggingface
GPT2BPETokenizer | huggingface
BertWordPieceLowerCase | huggingface
BertWordPieceCase | huggingface
NullTokenizer | null
ByteLevelTokenizer | bytes
"""
