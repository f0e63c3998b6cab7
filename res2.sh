source /tmp/e_e; cd /tmp/w/e_run
F="megatron-lightning fit --trainer.enable_progress_bar=false --trainer.log_every_n_steps=1 --trainer.limit_val_batches=1 --trainer.logger=CSVLogger"
M="$F --config configs/tiny_moe_cpu.yaml --trainer.val_check_interval=2"
$M --trainer.max_steps=22 --trainer.logger.save_dir=out/A2 --ckpt_path demo/s20.ckpt > A2.log 2>&1; echo A2 $?
$M --trainer.max_steps=24 --trainer.logger.save_dir=out/B --ckpt_path demo/checkpoints_moe/last.ckpt > B.log 2>&1; echo B $?
# kill a rank
$M --trainer.max_steps=200 --trainer.logger.save_dir=out/K --ckpt_path demo/s20.ckpt > K.log 2>&1 &
p=$!; sleep 60; for c in $(pgrep -P $p); do echo child $c; done; kid=$(pgrep -P $p | tail -1); kill -9 $kid; s=$(date +%s); wait $p; echo "K rc $? after $(( $(date +%s)-s )) s"; tail -2 K.log
G="megatron-lightning generate --checkpoint demo/s20.ckpt --tokenizer-model demo/stdlib_tokenizer.model --prompts import --max-new-tokens 8 --temperature 0"
$G; $G --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
