"""Connections of pipelines to trainers: arrays over many hosts, checkpoints, MaxText, Tunix.

Import the module that you need, such as `grain_sft.integrations.tunix`. So you need only the libraries of that module.
"""
