"""An example package with one thing of each kind that grain_sft accepts from outside, such as a layout or a transform.

A config names it as `grain_sft_example.module:Name`.
"""
