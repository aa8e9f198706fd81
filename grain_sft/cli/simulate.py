"""Command `simulate`, which predicts the requests, cache contents and waits of a run on many hosts."""

import argparse
import os
from typing import Any

from grain_sft.cli.arguments import Parser, at_least, open_config, steps_of, values_of, write_figures
from grain_sft.options import options_of
from grain_sft.progress import elapsed


def simulate(parser: Parser) -> None:
    """Declare `grain-sft simulate`."""
    from grain_sft.simulate import Conditions

    parser.add_config()
    add = parser.add_argument
    add("--hosts", type=at_least(1), required=True, metavar="H", help="hosts of the run, each of them one process")
    add("--steps", required=True, metavar="A:B", help="steps A to B - 1, counted from 0; the hosts start at step A")
    processes = "number of the hosts that also run as real processes, to measure them; 0 for none"
    add("--processes", type=at_least(0), default=2, metavar="N", help=processes)
    add("--as-bucket", action="store_true", help="count reads of local files as requests to a bucket")
    restart = "number of hosts after the simulated restart at step B (default: as --hosts)"
    add("--restart-hosts", type=at_least(1), metavar="H", help=restart)
    speeds = parser.add_argument_group("assumed speeds of hosts, network and bucket")
    parser.add_declared(Conditions, options_of(Conditions), speeds)
    parser.add_figures()
    add("--html", metavar="FILE", help="also write a page with the figures and their curves")


def run_simulate(options: argparse.Namespace) -> None:
    """Run `grain-sft simulate`."""
    from grain_sft.simulate import simulation_page
    from grain_sft.storage import write_bytes
    from grain_sft.view import require_matplotlib

    if options.html:
        require_matplotlib()
        if options.output and os.path.realpath(options.html) == os.path.realpath(options.output):
            options.parser.error("argument --html: this is also the file of --output. Give another name.")
    figures = write_figures(_figures, options)
    if options.html:
        write_bytes(options.html, simulation_page(figures, os.path.basename(options.config)).encode())


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate the run, print the lines of text, and return the figures."""
    from grain_sft.sampling import Host
    from grain_sft.simulate import Conditions, lines, measure_processes, simulate

    pipeline, measured = open_config(options, outputs=[options.output, options.html]), None
    steps = steps_of(pipeline, options.steps)
    pipeline = pipeline.at(steps.start)  # only the stage of the first step is simulated
    conditions = Conditions(**values_of(options, options_of(Conditions)))
    # refuse a wrong --restart-hosts before the measurements, which take long
    if options.restart_hosts is not None and steps.stop < pipeline.end_step:
        pipeline.sampler.with_host(Host(0, options.restart_hosts)).check_from(steps.stop)
    if options.processes:
        with elapsed("Measuring processes"):
            measured = measure_processes(pipeline, options.config, options.hosts, steps, conditions, options.processes)
    with elapsed("Simulating"):
        option_names = ("as_bucket", "restart_hosts")
        found = simulate(pipeline, options.hosts, steps, conditions, real=measured, **values_of(options, option_names))
    print(*lines(found), sep="\n")
    return {"config": options.config, **found}
