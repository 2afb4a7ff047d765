"""NOTES' tables of policies: a command measures them, and the same command finds what differs."""

import json

from kvtier.bench import policies
from kvtier.cli.main import main


def talks(folder, requests=60):
    """Twelve conversations that take turns, and grow."""
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 512 * (2 + number // 12),
            "hash_ids": [100 * (number % 12) + place for place in range(2 + number // 12)],
        }
        for number in range(requests)
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_the_command_measures_checks_and_tells_what_differs(tmp_path, capsys):
    trace, path = talks(tmp_path), tmp_path / "policies.json"
    notes = tmp_path / "NOTES.md"
    notes.write_text("# Notes\n\n<!-- begin policies -->\nold\n<!-- end policies -->\n\nMore.\n")
    words = [trace, "--generated", "25", "--output", str(path), "--notes", str(notes)]
    assert policies.main(words) == 0
    found = json.loads(path.read_text())
    assert found["trace"] == {"requests": 60, "chunks": 240, "different": 72}
    assert policies.main([*words, "--check", "--jobs", "2"]) == 0
    values = {row["name"]: row["value"] for row in found["rows"]}
    tables = (policies.shown_in_ram, policies.shown_in_both, policies.shown_kinds)
    for made in (*tables, policies.shown_kinds_in_both):
        assert len({len(line) for line in made(values)}) == 1
    text = notes.read_text()
    assert "old" not in text and text.endswith("<!-- end policies -->\n\nMore.\n")
    assert f"| {values['--policy lru --ram 20%: hits']:.2f} / " in text
    (row,) = (row for row in found["rows"] if row["name"] == "--policy lru --ram 20%: hits")
    capsys.readouterr()
    main(["simulate", trace, "--keep-partial", "--policy", "lru", "--ram", "20%"])
    assert f" {row['value']:.2f} %" in capsys.readouterr().out, "as the command says it"
    row["value"] += 0.1
    path.write_text(json.dumps(found))
    assert policies.main([*words, "--check"]) == 1
    assert "--policy lru --ram 20%: hits: " in capsys.readouterr().out
