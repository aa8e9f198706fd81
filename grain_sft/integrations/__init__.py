"""Connections of pipelines to trainers: arrays over many hosts, checkpoints, MaxText, Tunix.

Import only the module that you need, such as `grain_sft.integrations.tunix`. Each module needs other libraries.
"""
