"""The commands that run things: worker, launch, bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from transfer.hello import Side
from workers.cli_options import CaseOption, JsonOption, PairArgument, SetOption
from workers.config_load import load_pair
from workers.json_output import check_target, write_json

LogOption = Annotated[Path | None, typer.Option("--log-dir", help="Keep the workers' logs in this directory.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("worker")(worker)
    app.command("launch")(launch)
    app.command("bench")(bench)


def worker(  # noqa: PLR0913, PLR0917 - options of a command line
    pair: PairArgument,
    side: Annotated[
        Side | None, typer.Option(help="Which half; default: torchrun's first ranks are context, the rest generation.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Flat rank; of instance i of n ranks: i * n + rank. Default: told by torchrun's RANK."),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="Default: torchrun's MASTER_ADDR and MASTER_PORT.")
    ] = None,
    serve_rendezvous: Annotated[
        bool, typer.Option("--serve-rendezvous", help="Host the rendezvous in this process (one worker of a pair).")
    ] = False,
    case: CaseOption = None,
    overrides: SetOption = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Run one worker process of one side.

    Example: unikv worker pair.yaml --side context --rank 0 --rendezvous tcp://127.0.0.1:29500 --serve-rendezvous
    """
    from workers.launched import place_worker  # noqa: PLC0415
    from workers.process import die_with_parent, set_up_logging  # noqa: PLC0415
    from workers.worker_main import run_worker  # noqa: PLC0415 - imports torch

    if parent is not None:
        die_with_parent(parent)
    config = load_pair(pair, overrides=overrides or (), case=case)
    place = place_worker(config, side, rank, rendezvous)
    set_up_logging(f"{place.side} {place.rank}", verbose=verbose)
    serve = serve_rendezvous or place.serve
    code = run_worker(config, place.side, place.rank, place.url, serve=serve, several_hosts=place.several_hosts)
    raise typer.Exit(code)


def launch(
    pair: PairArgument,
    case: CaseOption = None,
    overrides: SetOption = None,
    log_dir: LogOption = None,
) -> None:
    """Start all workers of both sides and watch them until Ctrl-C; a dead worker ends the run with its reason.

    Example: unikv launch pattern-small
    """
    from workers.launch import launch_and_watch  # noqa: PLC0415 - imports torch

    console = Console(stderr=True)
    config = load_pair(pair, overrides=overrides or (), case=case)
    arguments = [pair, *(word for item in overrides or () for word in ("--set", item))]
    arguments += ["--case", case] if case else []
    raise typer.Exit(launch_and_watch(config, arguments, console, log_dir))


def bench(
    pair: PairArgument,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
    log_dir: LogOption = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="Use the workers announced there instead of launching some."),
    ] = None,
) -> None:
    """Launch a pair, drive its workload, verify every byte, report. Exit 1 where anything is wrong.

    Example: unikv bench smollm2 --json results.json
    """
    from workers.bench import run_bench, succeeded  # noqa: PLC0415 - imports torch
    from workers.bench_case import BenchRequest  # noqa: PLC0415
    from workers.bench_gpu import is_gpu_bench  # noqa: PLC0415
    from workers.process import set_up_logging  # noqa: PLC0415
    from workers.render_bench import print_result, verdict  # noqa: PLC0415

    if json is not None:
        check_target(json)
    console = Console(stderr=True) if json == "-" else Console()
    set_up_logging("bench")
    if is_gpu_bench(pair):
        raise typer.Exit(_bench_gpu(console, pair, overrides or (), case, json))
    request = BenchRequest(
        source=pair, overrides=tuple(overrides or ()), case=case, log_dir=log_dir, rendezvous_url=rendezvous
    )
    with ExitStack() as stack:
        result = run_bench(request, _progress(stack))
    fine = succeeded(result)
    if json is not None:
        write_json(result, json)
    if json != "-":
        print_result(console, result)
        console.print(verdict(result, fine=fine))
    raise typer.Exit(0 if fine else 1)


def _bench_gpu(console: Console, pair: str, overrides: Sequence[str], case: str | None, json: str | None) -> int:
    """Run a benchmark of the direct path between GPUs; 1 where a byte was wrong."""
    from workers.bench_gpu import gpu_bench_succeeded, run_gpu_bench  # noqa: PLC0415 - imports torch
    from workers.render_gpu import print_gpu_result  # noqa: PLC0415

    with ExitStack() as stack:
        result = run_gpu_bench(pair, overrides, case, _progress(stack))
    if json is not None:
        write_json(result, json)
    if json != "-":
        print_gpu_result(console, result)
    return 0 if gpu_bench_succeeded(result) else 1


def _progress(stack: ExitStack) -> Callable[[str, int, int], None]:
    """Return a callback that shows one bar per thing that runs, on stderr; the bars go when the work is over."""
    console = Console(stderr=True)
    bar = stack.enter_context(
        Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # else it leaves an empty line in a log
        )
    )
    tasks: dict[str, TaskID] = {}

    def show(title: str, finished: int, total: int) -> None:
        if title not in tasks:
            tasks[title] = bar.add_task(title, total=total)
        bar.update(tasks[title], completed=finished)

    return show
