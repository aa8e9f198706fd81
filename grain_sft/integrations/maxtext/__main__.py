"""Run a MaxText trainer on grain_sft's batches.

    python -m grain_sft.integrations.maxtext [TRAINER] [CONFIG.yml] key=value … grain_sft_config=PATH

TRAINER is pre_train (the default), sft, dpo (also ORPO, with dpo.algo=orpo) or distill. CONFIG.yml and key=value are as in
MaxText's own command. Without CONFIG.yml, MaxText uses the trainer's default config. grain_sft adds these keys, which it also
reads from environment variables such as GRAIN_SFT_CONFIG:

    grain_sft_config=PATH               the config of the data to train on
    grain_sft_eval_config=PATH          the config of the data to evaluate on; needed unless eval_interval=-1
    grain_sft_allow_other_data=true     continue from a checkpoint of a run on other data
    grain_sft_ignore_weights=true       train although the corpus has token weights, which MaxText's loss does not use

docs/maxtext.md describes these keys.
"""

from absl import app, flags

from grain_sft.integrations.maxtext import main

if __name__ == "__main__":
    app.run(
        lambda argv: main(argv[1:]),
        # absl prints this module's docstring for --help, but not for -h
        flags_parser=lambda argv: flags.FLAGS(["--help" if each == "-h" else each for each in argv], known_only=True),
    )
