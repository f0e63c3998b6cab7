"""``recipe from-megatron``: scripts of ``pretrain_gpt.py`` as configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lightning.cli import main
from megatron_lightning.errors import ConfigError
from megatron_lightning.recipe_reading.from_megatron.options import Options
from megatron_lightning.recipe_reading.from_megatron.recipe import convert
from megatron_lightning.recipe_reading.from_megatron.shell import read_command

_SCRIPT = r"""#!/bin/bash
# A comment with 'a quote
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINTS=${1:-"runs/first"}
LAYERS=4
GPUS=2
WORLD_SIZE=$(($GPUS*1))
HOST=$(hostname)       # never used
if [ ! -d "$CHECKPOINTS" ]; then mkdir -p "$(dirname "$CHECKPOINTS")"; fi

RANKS="--nproc_per_node $GPUS --nnodes 1 --node_rank 0"
MODEL=(
    --num-layers $LAYERS --hidden-size 64
    --num-attention-heads 4   # heads
    --seq-length 32 --max-position-embeddings 32
    # --kv-channels 16
    --moe-layer-freq "([0]+[1]*$(($LAYERS-1)))"
    --num-experts 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear
)
if [[ "$LAYERS" == 4 ]] || [[ -z "$LAYERS" ]]; then
    MODEL+=(
        "--pipeline-model-parallel-size 2"
        "--split '9,1,0'"
    )
elif [ $LAYERS -gt 4 ]; then
    source unread.sh
else
    for x in 1 2; do if true; then echo; fi; done
fi
TRAINING="--train-samples 40 --lr-warmup-samples 8 --global-batch-size 4 --lr 1e-3"
TRAINING="$TRAINING --micro-batch-size 2"
TRAINING+=" --save $CHECKPOINTS --load ${CHECKPOINTS}"

torchrun ${RANKS} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING} $MORE --mock-data --vocab-size 100 \
    --use-rotary-position-embeddings 2>&1 | tee log.txt
"""


def _options(script: str, *arguments: str) -> dict[str, list[str]]:
    return Options(read_command(script, arguments).options).given


def test_a_script_is_read_as_the_shell_reads_it() -> None:
    command = read_command(_SCRIPT, ["runs/second"])
    assert " ".join(command.launcher) == "torchrun --nproc_per_node 2 --nnodes 1 --node_rank 0"
    options = Options(command.options).given
    assert options["moe_layer_freq"] == ["([0]+[1]*3)"]
    assert options["pipeline_model_parallel_size"] == ["2"]
    assert options["split"] == ["9,1,0"]
    assert options["save"] == options["load"] == ["runs/second"]
    assert options["use_rotary_position_embeddings"] == []
    assert "kv_channels" not in options
    nested = "CMD='torchrun --nnodes 2 pretrain_gpt.py --bf16'\nsrun bash -c \"cd x && $CMD\""
    assert read_command(nested).options == ["--bf16"]
    assert _options("--lr=1 --lr=2 --bf16") == {"lr": ["2"], "bf16": []}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("\nX=$2\npretrain_gpt.py $X", r"line 2: \$2 has no value.* SCRIPT ARG1 ARG2"),
        ("X=$(nproc)\n\npretrain_gpt.py $X", r"line 1: \$\(nproc\) runs a command for its value"),
        ("while true; do\nX=1\ndone\npretrain_gpt.py", "line 1: while true … is not understood"),
        ("f() {\n}\npretrain_gpt.py", r"line 1: f\(\)"),
        ("if grep -q x f; then\nX=1\nfi\npretrain_gpt.py", "line 1: grep -q x f is no test"),
        ("\n. ./conf.sh\npretrain_gpt.py $X", "X has no value; line 2 sources a file"),
        ("X[0]=1\npretrain_gpt.py", "line 1: .*sets one element"),
        ("X=a\npretrain_gpt.py ${X%b}", r"line 2: \$\{X%b\} is not understood"),
        ("A='x\npretrain_gpt.py", "line 1: a quote"),
        ("torchrun pretrain_t5.py", r"line 1: pretrain_t5.py is run"),
        ("./pretrain.sh", "nothing here runs"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_command(script)


_LOOP = """OUT="none"
while [[ $# -gt 0 ]]; do
    case $1 in
        --out)
            OUT="$2"
            shift 2
            ;;
        *)
            for x in 1 2; do echo $x; done
            ;;
    esac
done
pretrain_gpt.py --save $OUT
"""


def test_a_loop_over_arguments_is_passed_where_there_are_none() -> None:
    assert _options(_LOOP) == {"save": ["none"]}
    with pytest.raises(ConfigError, match=r"line 2: while \[\[ \$# -gt … is not understood"):
        read_command(_LOOP, ["--out", "x"])


_TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--max-position-embeddings 32 --vocab-size 100 --mock-data --train-iters 10 "
)


def _at(options: str, path: str) -> Any:
    """Return the value at a path of the configuration, "" without one."""
    value: Any = convert((_TINY + options).split()).sections
    for key in path.split("."):
        if isinstance(value, dict) and "init_args" in value:
            value = value["init_args"]
        value = value.get(key, "") if isinstance(value, dict) else ""
    return value


@pytest.mark.parametrize(
    ("options", "path", "expected"),
    [
        # Megatron's defaults, where they are not ours
        ("", "model.config.normalization", "LayerNorm"),
        ("", "model.config.activation", "gelu_tanh"),
        ("--no-bias-gelu-fusion", "model.config.activation", "gelu"),
        ("--disable-bias-linear", "model.config.activation", "gelu"),
        ("", "model.config.add_bias_linear", True),
        ("", "model.config.share_embeddings_and_output_weights", True),
        ("", "model.config.position_embedding_type", "learned_absolute"),
        ("", "model.config.hidden_dropout", 0.1),
        ("", "model.betas", [0.9, 0.999]),
        ("", "model.weight_decay", 0.01),
        ("", "model.lr_schedule", "linear"),
        ("", "trainer.precision", "32-true"),
        ("", "trainer.strategy.data_parallel", "ddp"),
        ("", "trainer.strategy.non_finite", "raise"),
        ("--fp16", "trainer.strategy.non_finite", ""),
        ("--nproc-per-node 2 --tensor-model-parallel-size 2",
         "trainer.strategy.sequence_parallel", False),
        ("--use-distributed-optimizer", "trainer.strategy.data_parallel", "zero1"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
         "trainer.strategy.data_parallel", "fsdp"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
         "trainer.strategy.data_parallel_options",
         {"reshard_after_forward": True, "reduce_every_microbatch": True}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
         "trainer.strategy.data_parallel_options.reshard_after_forward", False),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
         "trainer.strategy.data_parallel_options.reshard_after_forward", False),
        ("--use-flash-attn", "model.config.attention_backend", "flash"),
        ("--use-flash-attn --window-size 127,0", "model.config.attention_backend", ""),
        ("--attention-backend fused --softmax-type learnable",
         "model.config.attention_backend", ""),
        # values in other units or forms
        ("--nproc-per-node 2 --tensor-model-parallel-size 2", "model.config.vocab_size", 256),
        ("--nproc-per-node 2 --micro-batch-size 3", "data.global_batch_size", 6),
        ("--nproc-per-node 2 --pipeline-model-parallel-size 2 "
         "--num-layers-per-virtual-pipeline-stage 1",
         "trainer.strategy.virtual_pipeline_model_parallel_size", 2),
        ("--lr-warmup-fraction .2", "model.warmup_steps", 2),
        ("--exit-duration-in-mins 1500", "trainer.max_time", "01:01:00:00"),
        ("--distributed-timeout-minutes 2", "trainer.strategy.timeout_s", 120.0),
        ("--clip-grad 0.0", "trainer.gradient_clip_val", None),
        ("--window-size 127,0", "model.config.window_size", [127, 0]),
        ("--moe-layer-freq ([0]+[1]*3) --num-experts 2", "model.config.moe.layer_freq",
         [0, 1, 1, 1]),
        ("--num-query-groups 2", "model.config.num_query_groups", ""),
        ("--group-query-attention --num-query-groups 2", "model.config.num_query_groups", 2),
        ("--rampup-batch-size 2 2 8 --global-batch-size 4",
         "data.batch_size_schedule.rampup_batch_size", [2, 2, 8]),
        ("--train-data-path 1 a 2 b --valid-data-path c", "data.data_prefix",
         {"train": [[1, "a"], [2, "b"]], "validation": "c"}),
        ("--use-rope-scaling --position-embedding-type rope",
         "model.config.rope_scaling.original_max_position_embeddings", 8192),
        ("--multi-latent-attention --disable-bias-linear", "model.config.mla.kv_lora_rank", 32),
        ("--multi-latent-attention --disable-bias-linear", "model.config.mla.q_lora_rank", None),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3",
         "model.lr_schedule.wsd_decay_steps", 3),
        ("--seed 7", "data.seed", 7),
        ("--group-query-attention", "model.config.num_query_groups", 1),
        ("--multi-latent-attention --disable-bias-linear --rope-type rope",
         "model.config.rope_scaling", ""),
        ("--lr-decay-style constant --min-lr 1e-4", "model.min_learning_rate", ""),
        ("--decoupled-lr 2e-3 --min-lr 1e-5", "model.param_groups", [
            {"name": "embeddings", "params": ["**word_embeddings.weight", "**output_layer.weight"],
             "lr": 2e-3, "min_lr": 1e-5},
            {"name": "no_decay", "max_dims": 1, "wd_mult": 0.0},
        ]),
        ("--no-check-for-nan-in-loss-and-grad --rerun-mode disabled",
         "trainer.strategy.non_finite", ""),
        ("--timing-log-level 0", "trainer.callbacks", ""),
        ("--profile-step-start 3", "trainer.callbacks", ""),
    ],
)  # fmt: skip
def test_values_are_written_as_they_are_here(options: str, path: str, expected: Any) -> None:
    assert _at(options, path) == expected


def test_what_has_no_counterpart_is_listed() -> None:
    words = (
        _TINY + "--empty-unused-memory-level 1 --no-such 3 --use-mcore-models --load x"
    ).split()
    left_out = convert(words).left_out
    assert left_out == [
        "--load is --ckpt_path here (last, or a folder; weights of another model: "
        "model.init_from_hf)",
        "--empty-unused-memory-level is not available: PyTorch's allocator keeps its blocks",
        "--no-such is unknown here",
    ]
    for words, message in (
        (["--train-iters", "3"], "--vocab-size 32000"),
        (["--train-iters", "3", "--nnodes", "4"], "how many ranks a node has"),
        (["--vocab-size", "3"], "neither --train-iters nor --train-samples"),
        (["--train-iters", "3", "--lr"], "--lr has no value"),
        (["--train-iters", "3", "--nproc-per-node", "3", "--tensor-model-parallel-size", "2"],
         "no multiple of 2 ranks"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            convert(words)


@pytest.mark.slow
def test_a_script_becomes_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, file = tmp_path / "train.sh", tmp_path / "run.yaml"
    script.write_text(_SCRIPT)
    words = ["recipe", "from-megatron", str(script), str(tmp_path / "saved"), "--output", str(file)]
    main([*words, "--extra", "--no-such-option 1"])
    assert capsys.readouterr().out.splitlines() == ["--no-such-option is unknown here", str(file)]
    with pytest.raises(SystemExit):
        main(words)
    assert "exists already" in capsys.readouterr().err
    main(["plan", "--config", str(file)])
    assert "2 ranks: tp 1 x cp 1 x dp 1 x pp 2" in capsys.readouterr().out
    one = ["--trainer.devices=1", "--trainer.strategy.pipeline_model_parallel_size=1"]
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--data.num_workers=0"]
    short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    main(["fit", "--config", str(file), *one, *quiet, *short])
    assert (tmp_path / "saved" / "last.ckpt").exists()
    assert yaml.safe_load(file.read_text())["ckpt_path"] == "last"
