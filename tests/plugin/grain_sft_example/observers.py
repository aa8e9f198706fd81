"""An observer of the example plugin: it writes a line to a file for each batch."""

import os

from grain_sft.observers import Delivery, Observer


class StepFile(Observer):
    """Write the step of each batch that the trainer gets to the file in $GRAIN_SFT_EXAMPLE_STEPS."""

    def batch_handed_out(self, delivery: Delivery) -> None:
        with open(os.environ["GRAIN_SFT_EXAMPLE_STEPS"], "a") as file:
            file.write(f"{delivery.step}\n")
