"""The command line's surface: names, exit codes, what stdout carries, and that help is light."""

import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from dflash_tools.cli import app

COMMANDS = {
    "generate": {"--out", "--set"},
    "extract": {"--store", "--set", "--limit", "--dry-run", "--show", "--strict", "--close", "--repair", "--overwrite"},
    "train": {"--store", "--run", "--set", "--resume", "--dry-run"},
    "report store": {"--out"},
    "report plan": {"--store", "--set", "--out"},
    "report run": {"--out"},
    "report compare": {"--out"},
    "evaluate": {
        "--checkpoint",
        "--target",
        "--dtype",
        "--prompts",
        "--max-new-tokens",
        "--num-draft-tokens",
        "--temperature",
    },
    "export": {"--out", "--checkpoint", "--format"},
    "check": {"--target"},
    "convert": {"--from", "--store", "--target", "--target-layer-ids", "--layer-ids-are"},
    "verify": {"--deep"},
    "demo": {"--out"},
}


def run_cli(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "dflash_tools", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def command_of(name):
    command = get_command(app)
    for part in name.split():
        command = command.commands[part]
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_keeps_its_promised_options(name):
    found = {option for parameter in command_of(name).params for option in parameter.opts}
    assert COMMANDS[name] | {"--json"} <= found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name):
    assert all(parameter.help for parameter in command_of(name).params)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_works_for_every_command(name):
    """CL-01."""
    result = run_cli(*name.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


def test_help_imports_neither_torch_nor_zarr_nor_transformers_nor_polars():
    heavy = "{'torch', 'zarr', 'transformers', 'polars', 'altair'}"
    code = f"import sys, dflash_tools.cli; print(len({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "0"


def test_an_unknown_command_and_a_missing_option_exit_2():
    assert run_cli("extracts").returncode == 2
    assert run_cli("extract", "x.toml").returncode == 2


def test_a_user_error_is_one_line_without_a_traceback(tmp_path):
    """CL-02."""
    result = run_cli("extract", tmp_path / "none.toml", "--store", tmp_path / "store")
    assert result.returncode == 2
    assert re.fullmatch(r"dflash-tools: .*none\.toml: no such file; .*\n", result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("extract", "folder", "--store", "x"),
        ("report", "store", "a-file"),
        ("report", "run", "a-file"),
        ("check", "a-file"),
        ("export", "a-file", "--out", "x"),
        ("verify", "a-file"),
    ],
    ids=" ".join,
)
def test_a_path_of_the_wrong_kind_is_one_line_and_exit_2(tmp_path, arguments):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a-file").touch()
    result = run_cli(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("dflash-tools: ")
    assert result.stderr.count("\n") == 1


def test_version_is_printed():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run_cli("--version").stdout)


def test_json_output_is_one_object_and_nothing_else(tmp_path):
    from make_store import make_store

    store = make_store(tmp_path / "store", lengths=[40, 50, 60, 70])
    result = run_cli("verify", store, "--json")
    assert json.loads(result.stdout) == {"ok": True, "damage": []}
    result = run_cli("report", "store", store, "--json")
    assert isinstance(json.loads(result.stdout), dict)
