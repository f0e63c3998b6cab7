"""Options of Megatron-LM's ``pretrain_gpt.py`` and of torchrun beside options of ``fit``.

A row is ``old name | here | note``. ``here`` is an option, an option and its value, a callback,
"always" where no option is needed, or "-" where nothing exists. The note of "-" says why.
"""

from __future__ import annotations

OPTIONS = """
# Parallelism
tensor-model-parallel-size | trainer.strategy.tensor_model_parallel_size
pipeline-model-parallel-size | trainer.strategy.pipeline_model_parallel_size
context-parallel-size | trainer.strategy.context_parallel_size
expert-model-parallel-size | trainer.strategy.expert_model_parallel_size
expert-tensor-parallel-size | trainer.strategy.expert_tensor_parallel_size
virtual-pipeline-model-parallel-size | trainer.strategy.virtual_pipeline_model_parallel_size
num-virtual-stages-per-pipeline-rank | trainer.strategy.virtual_pipeline_model_parallel_size
num-layers-per-virtual-pipeline-stage | trainer.strategy.virtual_pipeline_model_parallel_size | layers / (stages x layers of a chunk)
pipeline-model-parallel-layout | trainer.strategy.pipeline_options.pipeline_model_parallel_layout
decoder-first-pipeline-num-layers | trainer.strategy.pipeline_options.num_layers_in_first_pipeline_stage
decoder-last-pipeline-num-layers | trainer.strategy.pipeline_options.num_layers_in_last_pipeline_stage
account-for-embedding-in-pipeline-split | trainer.strategy.pipeline_options.account_for_embedding_in_pipeline_split
account-for-loss-in-pipeline-split | trainer.strategy.pipeline_options.account_for_loss_in_pipeline_split
microbatch-group-size-per-virtual-pipeline-stage | trainer.strategy.pipeline_options.microbatch_group_size_per_vp_stage
sequence-parallel | trainer.strategy.sequence_parallel | on by itself with tensor parallelism
cp-comm-type | trainer.strategy.context_options.cp_comm_type
hierarchical-context-parallel-sizes | trainer.strategy.context_options.hierarchical_context_parallel_sizes
use-distributed-optimizer | trainer.strategy.data_parallel = zero1 | the default
use-megatron-fsdp | trainer.strategy.data_parallel = fsdp
use-custom-fsdp | trainer.strategy.data_parallel = fsdp
use-torch-fsdp2 | trainer.strategy.data_parallel = fsdp
data-parallel-sharding-strategy | trainer.strategy.data_parallel | no_shard is ddp, optim zero1, optim_grads and optim_grads_params fsdp, with data_parallel_options.reshard_after_forward=false or true
torch-fsdp2-no-reshard-after-forward | trainer.strategy.data_parallel_options.reshard_after_forward = false
use-nccl-ub | - | buffers are not registered with NCCL
fsdp-manual-registration | - | buffers are not registered with NCCL
fsdp-double-buffer | - | FSDP2 allocates what it gathers
num-distributed-optimizer-instances | trainer.strategy.data_parallel_options.num_distributed_optimizer_instances
overlap-grad-reduce | always
overlap-param-gather | trainer.strategy.data_parallel_options.overlap_param_gather
grad-reduce-in-bf16 | trainer.strategy.data_parallel_options.grad_reduce_in_bf16
accumulate-allreduce-grads-in-fp32 | always
ddp-bucket-size | trainer.strategy.data_parallel_options.bucket_size
optimizer-cpu-offload | trainer.strategy.data_parallel_options.optimizer_cpu_offload
exp-avg-dtype | trainer.strategy.data_parallel_options.moments_dtype
tp-comm-overlap | - | communication of tensor parallelism does not overlap with its matmuls
overlap-moe-expert-parallel-comm | - | communication of experts does not overlap with other layers
delay-wgrad-compute | trainer.strategy.pipeline_schedule = zb-h1
distributed-backend | trainer.strategy.process_group_backend
distributed-timeout-minutes | trainer.strategy.timeout_s | in seconds
nccl-communicator-config-path | trainer.strategy.nccl_communicator_config_path
nproc-per-node | trainer.devices
nnodes | trainer.num_nodes
node-rank | - | torchrun keeps this option
master-addr | - | torchrun keeps this option
master-port | - | torchrun keeps this option

# Batches and steps
micro-batch-size | trainer.strategy.micro_batch_size
global-batch-size | data.global_batch_size
rampup-batch-size | data.batch_size_schedule
step-batch-size-schedule | data.batch_size_schedule
train-iters | trainer.max_steps
train-samples | data.num_train_samples | samples / global_batch_size is trainer.max_steps
eval-interval | trainer.val_check_interval | in batches
eval-iters | trainer.limit_val_batches
log-interval | trainer.log_every_n_steps
seed | seed_everything
exit-interval | trainer.max_steps
exit-duration-in-mins | trainer.max_time | as 00:03:55:00
dataloader-type | always | samples come in the order of single; cyclic draws another one
num-workers | data.num_workers

# Optimizer
optimizer | model.optimizer | AdamW by default; others by class_path
lr | model.learning_rate
min-lr | model.min_learning_rate
lr-warmup-iters | model.warmup_steps
lr-warmup-samples | model.warmup_steps | in steps
lr-warmup-fraction | model.warmup_steps | a fraction is a share of decay_steps
lr-decay-iters | model.decay_steps
lr-decay-samples | model.decay_steps | in steps
lr-decay-style | model.lr_schedule | cosine, linear or wsd
lr-wsd-decay-iters | model.lr_schedule | wsd_decay_steps of LRSchedule
lr-wsd-decay-samples | model.lr_schedule | wsd_decay_steps of LRSchedule
lr-wsd-decay-style | model.lr_schedule | of LRSchedule
weight-decay | model.weight_decay
start-weight-decay | model.lr_schedule | its start_wd
end-weight-decay | model.lr_schedule | its end_wd
weight-decay-incr-style | model.lr_schedule | its wd_incr_style
adam-beta1 | model.betas | the first of two
adam-beta2 | model.betas | the second of two
adam-eps | model.eps
clip-grad | trainer.gradient_clip_val
decoupled-lr | model.param_groups | a group with the patterns of embedding and head
decoupled-min-lr | model.param_groups
use-precision-aware-optimizer | trainer.strategy.data_parallel_options.moments_dtype
main-grads-dtype | always
calculate-per-token-loss | always
check-for-nan-in-loss-and-grad | trainer.strategy.non_finite = raise
no-check-for-nan-in-loss-and-grad | trainer.strategy.non_finite = ignore

# Precision and kernels
bf16 | trainer.precision = bf16-true | with fp32 main params
fp16 | trainer.precision = 16-true | with fp32 main params
loss-scale | - | fp16 scales its loss by itself
initial-loss-scale | trainer.plugins | loss_scale of MegatronHalfPrecision
fp8-format | trainer.plugins | MegatronFP8Precision with recipe.format
fp8-hybrid | trainer.plugins | MegatronFP8Precision with recipe.format hybrid
fp8-recipe | trainer.plugins | MegatronFP8Precision with recipe.scaling
fp8-margin | trainer.plugins | MegatronFP8Precision
fp8-amax-history-len | trainer.plugins | MegatronFP8Precision with recipe.amax_history_len
fp8-amax-compute-algo | trainer.plugins | MegatronFP8Precision with recipe.amax_compute_algo
fp8-param-gather | trainer.plugins | MegatronFP8Precision with recipe.fp8_param_gather
transformer-impl | always | one model for all kernels; MegatronFP8Precision takes backend=transformer_engine
attention-backend | model.config.attention_backend | fused is cudnn, unfused math, local math
use-flash-attn | model.config.attention_backend = flash
attention-softmax-in-fp32 | always | attention kernels sum the softmax in fp32
recompute-activations | trainer.strategy.recompute.recompute_granularity = selective
recompute-granularity | trainer.strategy.recompute.recompute_granularity
recompute-method | trainer.strategy.recompute.recompute_method
recompute-num-layers | trainer.strategy.recompute.recompute_num_layers
recompute-modules | trainer.strategy.recompute.recompute_modules
cpu-offloading | trainer.strategy.recompute.offload_modules
checkpoint-activations | trainer.strategy.recompute.recompute_granularity = full
cross-entropy-loss-fusion | always
enable-cuda-graph | - | layers are not captured; set trainer.strategy.compile=block
cuda-graph-impl | - | layers are not captured; set trainer.strategy.compile=block
external-cuda-graph | - | layers are not captured; set trainer.strategy.compile=block
no-masked-softmax-fusion | always | PyTorch chooses the attention kernel
no-persist-layer-norm | always
no-rope-fusion | always
no-bias-swiglu-fusion | always
no-bias-dropout-fusion | always
init-model-with-meta-device | always
no-gradient-accumulation-fusion | always
use-cpu-initialization | always | first values do not depend on the layout
empty-unused-memory-level | - | PyTorch's allocator keeps its blocks
deterministic-mode | trainer.deterministic

# Model
num-layers | model.config.num_layers
hidden-size | model.config.hidden_size
ffn-hidden-size | model.config.ffn_hidden_size
num-attention-heads | model.config.num_attention_heads
kv-channels | model.config.kv_channels
group-query-attention | model.config.num_query_groups | with --num-query-groups
num-query-groups | model.config.num_query_groups
max-position-embeddings | model.config.max_sequence_length
position-embedding-type | model.config.position_embedding_type
no-position-embedding | model.config.position_embedding_type = rope
use-rotary-position-embeddings | model.config.position_embedding_type = rope
rotary-base | model.config.rotary_base
rotary-percent | model.config.rotary_percent
rotary-interleaved | model.config.rotary_interleaved
rotary-seq-len-interpolation-factor | model.config.rope_scaling.factor | with rope_type linear
use-rope-scaling | model.config.rope_scaling | with rope_type llama3
rope-scaling-factor | model.config.rope_scaling.factor
rotary-scaling-factor | model.config.rope_scaling.factor | with rope_type yarn
mscale | model.config.rope_scaling.mscale
mscale-all-dim | model.config.rope_scaling.mscale_all_dim
rope-type | model.config.rope_scaling.rope_type
yarn-original-max-position-embeddings | model.config.rope_scaling.original_max_position_embeddings
yarn-beta-fast | model.config.rope_scaling.beta_fast
yarn-beta-slow | model.config.rope_scaling.beta_slow
no-rope-freq | model.config.no_rope_freq
normalization | model.config.normalization
norm-epsilon | model.config.layernorm_epsilon
apply-layernorm-1p | model.config.layernorm_zero_centered_gamma
qk-layernorm | model.config.qk_layernorm
swiglu | model.config.activation = swiglu | the default
squared-relu | model.config.activation = squared_relu
quick-geglu | model.config.activation = quick_geglu
openai-gelu | model.config.activation = gelu_tanh
no-bias-gelu-fusion | model.config.activation = gelu
disable-bias-linear | model.config.add_bias_linear = false | the default
add-qkv-bias | model.config.add_qkv_bias
untie-embeddings-and-output-weights | model.config.share_embeddings_and_output_weights = false | the default
attention-dropout | model.config.attention_dropout
hidden-dropout | model.config.hidden_dropout
window-size | model.config.window_size
window-attn-skip-freq | model.config.window_attn_skip_freq
softmax-type | model.config.softmax_type
glu-linear-offset | model.config.glu_linear_offset
activation-func-clamp-value | model.config.activation_func_clamp_value
fp32-residual-connection | model.config.fp32_residual_connection
init-method-std | model.config.init_method_std
make-vocab-size-divisible-by | model.config.vocab_size | write the padded number
mtp-num-layers | model.config.mtp_num_layers
mtp-loss-scaling-factor | model.config.mtp_loss_scaling_factor
hybrid-layer-pattern | model.config.layer_pattern
hybrid-override-pattern | model.config.layer_pattern
mamba-state-dim | model.config.mamba.state_dim
mamba-head-dim | model.config.mamba.head_dim
mamba-num-groups | model.config.mamba.num_groups
mamba-num-heads | model.config.mamba.num_heads
multi-latent-attention | model.config.mla
q-lora-rank | model.config.mla.q_lora_rank
kv-lora-rank | model.config.mla.kv_lora_rank
qk-head-dim | model.config.mla.qk_head_dim
qk-pos-emb-head-dim | model.config.mla.qk_pos_emb_head_dim
v-head-dim | model.config.mla.v_head_dim
use-mcore-models | always
use-legacy-models | - | one model is here
spec | model.config.layer_pattern | a kind of layer of your own by class path

# Experts
num-experts | model.config.moe.num_experts
moe-router-topk | model.config.moe.router_topk
moe-router-score-function | model.config.moe.router_score_function
moe-router-pre-softmax | model.config.moe.router_pre_softmax
moe-router-topk-scaling-factor | model.config.moe.router_topk_scaling_factor
moe-router-num-groups | model.config.moe.router_num_groups
moe-router-group-topk | model.config.moe.router_group_topk
moe-router-dtype | model.config.moe.router_dtype
moe-router-load-balancing-type | model.config.moe.router_load_balancing_type
moe-router-enable-expert-bias | model.config.moe.router_enable_expert_bias
moe-router-bias-update-rate | model.config.moe.router_bias_update_rate
moe-router-force-load-balancing | model.config.moe.router_force_load_balancing
moe-aux-loss-coeff | model.config.moe.aux_loss_coeff
moe-z-loss-coeff | model.config.moe.z_loss_coeff
moe-input-jitter-eps | model.config.moe.input_jitter_eps
moe-expert-capacity-factor | model.config.moe.expert_capacity_factor
moe-token-drop-policy | model.config.moe.token_drop_policy
moe-pad-expert-input-to-capacity | model.config.moe.pad_expert_input_to_capacity
moe-ffn-hidden-size | model.config.moe.ffn_hidden_size
moe-latent-size | model.config.moe.latent_size
moe-shared-expert-intermediate-size | model.config.moe.shared_expert_intermediate_size
moe-layer-freq | model.config.moe.layer_freq
moe-token-dispatcher-type | model.config.moe.token_dispatcher_type
moe-grouped-gemm | model.config.moe.grouped_gemm | the default
moe-permute-fusion | always
moe-router-fusion | always
moe-shared-expert-overlap | - | communication of experts does not overlap with other layers
moe-use-upcycling | megatron-lightning checkpoint upcycle
moe-enable-deepep | - | its kernels are not part of this package
moe-layer-recompute | trainer.strategy.recompute.recompute_modules

# Data and tokenizer
data-path | data.data_prefix
train-data-path | data.data_prefix | with lists for validation and test
valid-data-path | data.data_prefix | the part validation
test-data-path | data.data_prefix | the part test
data-args-path | data.data_prefix
per-split-data-args-path | data.data_prefix
data-cache-path | data.cache_dir
data-impl | always
mock-data | data.mock = true
split | data.split
seq-length | data.sequence_length
eod-mask-loss | data.eod_mask_loss
reset-position-ids | data.reset_position_ids
reset-attention-mask | data.reset_attention_mask
no-create-attention-mask-in-dataloader | always
no-mmap-bin-files | - | files are mapped into memory
tokenizer-type | data.tokenizer_type
tokenizer-model | data.tokenizer_model
vocab-size | data.vocab_size | and model.config.vocab_size
vocab-file | data.tokenizer_model | a folder with vocabulary and merges, type huggingface
merge-file | data.tokenizer_model | a folder with vocabulary and merges, type huggingface
tiktoken-pattern | - | type tiktoken is not read; name its tokenizer.json

# Checkpoints
save | trainer.callbacks | ModelCheckpoint with dirpath
save-interval | trainer.callbacks | ModelCheckpoint with every_n_train_steps
load | ckpt_path | last, or a folder; weights of another model: model.init_from_hf
finetune | model.init_from_hf | weights alone
pretrained-checkpoint | model.init_from_hf
no-load-optim | model.init_from_hf | weights alone
no-load-rng | always
no-save-optim | - | a checkpoint resumes the run; convert export writes weights
no-save-rng | always
ckpt-format | always | one format, loaded on any layout; convert import reads torch_dist
use-dist-ckpt | always
dist-ckpt-strictness | - | strict_loading is an attribute of the LightningModule
async-save | trainer.strategy.checkpoint_options.async_save
ckpt-fully-parallel-save | always
use-checkpoint-args | always | a checkpoint holds its model's sizes
exit-on-missing-checkpoint | always

# Logs and long runs
tensorboard-dir | trainer.logger | TensorBoardLogger with save_dir
wandb-project | trainer.logger | WandbLogger with project
wandb-exp-name | trainer.logger | WandbLogger with name
logging-level | - | Python's logging sets the level
moe-per-layer-logging | always
log-throughput | callback ThroughputMonitor
log-memory-to-tensorboard | callback MemoryMonitor
log-timers-to-tensorboard | callback StageTimers
log-validation-ppl-to-tensorboard | - | val_loss is logged; perplexity is its exponential
log-straggler | callback StragglerMonitor
log-params-norm | callback GradientNormMonitor
timing-log-level | callback StageTimers
profile | callback ProfilerWindow
profile-step-start | callback ProfilerWindow | first_step
profile-step-end | callback ProfilerWindow | num_steps
profile-ranks | callback ProfilerWindow | ranks
use-pytorch-profiler | callback ProfilerWindow
manual-gc | callback GarbageCollection
exit-signal-handler | callback RescueCheckpoint
rerun-mode | trainer.strategy.non_finite = raise
inprocess-restart | restarts.in_process
no-one-logger | - | nothing is reported to anyone
one-logger-project | - | nothing is reported to anyone

# Options of Megatron Bridge
recipe | config | fit --config llama32_1b; recipe list prints the names
hf-path | model.init_from_hf
hf-model | model.init_from_hf
"""
