"""Simulation of a run on many hosts: rows, requests, bytes, times and memory of the hosts."""

from grain_sft.simulate.conditions import Conditions
from grain_sft.simulate.lines import lines
from grain_sft.simulate.page import simulation_page
from grain_sft.simulate.processes import Measured, measure_processes
from grain_sft.simulate.simulate import simulate

__all__ = ["Conditions", "Measured", "lines", "measure_processes", "simulate", "simulation_page"]
