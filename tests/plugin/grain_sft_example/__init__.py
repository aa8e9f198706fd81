"""One entry of each kind that grain_sft takes from outside: a config names it as `grain_sft_example.module:Name`."""
