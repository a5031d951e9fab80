from dflash_tools.extract.progress import Progress


def test_plain_lines_tell_tokens_rate_and_the_end(capsys):
    with Progress(100) as progress:
        progress.say("loading")
        progress.begin()
        progress.advance(40)
        progress.advance(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading"
    assert len(lines) == 2, "a line at intervals and one at the end, not one per batch"
    assert lines[1].startswith("extract: 100 of 100 tokens")


def test_other_processes_are_silent(capsys):
    with Progress(100, silent=True) as progress:
        progress.begin()
        progress.say("loading")
        progress.advance(100)
    assert capsys.readouterr().err == ""
