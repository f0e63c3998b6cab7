"""Print the validation losses in a folder of TensorBoard logs, one run after another:
show_losses.py FOLDER."""

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(folder: str) -> None:
    for run in sorted(Path(folder).iterdir()):
        events = EventAccumulator(str(run))
        events.Reload()
        if "val_loss" in events.Tags()["scalars"]:
            losses = ", ".join(
                f"{event.step + 1}: {event.value:.3f}" for event in events.Scalars("val_loss")
            )
            print(f"{run.name}  step: loss  {losses}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(
            "usage: python examples/show_losses.py FOLDER, such as demo/logs, in which each run "
            "has a folder"
        )
    main(sys.argv[1])
