"""Connections of pipelines to trainers: arrays over many hosts, checkpoints, MaxText, Tunix.

Import the module that you need, such as `grain_sft.integrations.tunix`, so that you need only its libraries.
"""
