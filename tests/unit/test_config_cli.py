"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import pytest

from server.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("outrider 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "outrider serve [MODEL]"),
        (["serv"], "did you mean serve?"),
        (["bench"], "outrider bench http"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["bench", "http", "--stream", "1"], "did you mean --streams?"),
        (["demo"], "outrider demo moe"),
        (["demo", "moe"], "outrider: the following arguments are required: --out (see outrider demo moe --help)"),
        (["demo", "moe", "--out", "x", "--experts", "int3"], "outrider: argument --experts: invalid choice: 'int3'"),
        (["demo", "moe", "--ou", "x"], "outrider: the following arguments are required: --out"),
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_a_failure_that_is_explained_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_print_config_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--seed", "5", "--print-config"]) == 0
    assert "seed: 5" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize(
    ("argv", "listed"),
    [
        ([], ["serve", "check", "bench http", "bench decode", "bench kernels", "demo moe"]),
        (["bench"], ["bench http", "bench decode", "bench kernels"]),
        (["demo"], ["demo moe"]),
    ],
)
def test_help_lists_the_commands(
    argv: list[str], listed: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, flag]) == 0
    captured = capsys.readouterr()
    assert all(f"  outrider {command} " in captured.out for command in listed) and captured.err == ""


@pytest.mark.parametrize("argv", [["serve", "--help"], ["bench", "http", "--help"], ["demo", "moe", "--help"]])
def test_help_exits_with_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0 and "--" in capsys.readouterr().out
