"""Print the validation losses in a folder of TensorBoard logs, one run after another."""

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(folder: str) -> None:
    for run in sorted(Path(folder).iterdir()):
        events = EventAccumulator(str(run))
        events.Reload()
        if "val_loss" in events.Tags()["scalars"]:
            losses = ", ".join(f"{event.step + 1}: {event.value:.3f}" for event in events.Scalars("val_loss"))
            print(f"{run.name}  step: loss  {losses}")


if __name__ == "__main__":
    main(sys.argv[1])
