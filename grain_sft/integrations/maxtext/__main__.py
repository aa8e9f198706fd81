"""`python -m grain_sft.integrations.maxtext`: MaxText's trainer on grain_sft's batches."""

from absl import app

from grain_sft.integrations.maxtext import main

if __name__ == "__main__":
    app.run(lambda argv: main(argv[1:]))
