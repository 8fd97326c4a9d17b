"""A process with a Trainer that pushes: huggingface_hub reads its endpoint from the environment when it is imported."""

from __future__ import annotations

import os
import sys


def main(folder: str, attached: str, strategy: str, pace: str) -> None:
    """Train six steps with three saves; says what is left in the output folder.

    With ``pace`` "waits" each step waits for the pushes so far: Trainer uploads files of its output folder, which the
    next save replaces.
    """
    from transformers import TrainerCallback

    from holdfast.run.keep import Keep
    from holdfast.trainers.huggingface import HoldfastCallback
    from tests.servers.hub import TOKEN
    from tests.trainers import hf_runs

    output = os.path.join(folder, "mine")
    trainer = hf_runs.trainer_of(
        output, push_to_hub=True, hub_token=TOKEN, hub_strategy=strategy, hub_always_push=True,
        num_train_epochs=1, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    if attached == "holdfast":
        HoldfastCallback(os.path.join(folder, "steps"), keep=Keep(last=1), worker="thread").attach(trainer)
    if pace == "waits":

        class Waits(TrainerCallback):
            def on_step_begin(self, *_: object, **__: object) -> None:
                trainer._finish_current_push()

        trainer.add_callback(Waits())
    trainer.train()
    print("left", *sorted(os.listdir(output)))


if __name__ == "__main__":
    main(*sys.argv[1:])
