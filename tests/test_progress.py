from dflash_tools.progress import Progress, track


def test_plain_lines_tell_units_rate_and_the_end(capsys):
    with Progress("extract", 100, "tokens") as progress:
        progress.say("loading")
        progress.begin()
        progress.advance(40)
        progress.advance(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading"
    assert len(lines) == 2, "a line at intervals and one at the end, not one per batch"
    assert lines[1].startswith("extract: 100 of 100 tokens, ")
    assert "tokens/s, about 0 s left" in lines[1]


def test_work_that_goes_on_counts_from_where_it_stood(capsys):
    with Progress("train", 10, "steps", done=8) as progress:
        progress.begin()
        progress.advance(1, "loss 2.000")
        progress.advance(1, "loss 1.500")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: 10 of 10 steps, loss 1.500, about 0 s left")


def test_other_processes_are_silent(capsys):
    with Progress("extract", 100, "tokens", silent=True) as progress:
        progress.begin()
        progress.say("loading")
        progress.advance(100)
    assert capsys.readouterr().err == ""


def test_tracked_items_come_unchanged_and_are_counted(capsys):
    assert list(track(["a", "b", "c"], "decode", "prompts")) == ["a", "b", "c"]
    assert capsys.readouterr().err.startswith("decode: 3 of 3 prompts")
