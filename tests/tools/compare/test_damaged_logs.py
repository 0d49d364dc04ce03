"""Logs with random damage: each is refused, or every line of it is in the curve or was an empty cell."""

import csv
import io
import json
import random

import pytest

from halfstep.core.compare.gaps import CompareError
from halfstep.tools.compare.logs import EMPTY, read_log

HEAD = ["step", "loss", "lr", "note"]
CELLS = ["", "None", "nan", "inf", "-1e400", "two", '"', "1,5", "0x10", "\t", "é", "1e3", " 3.5 ", "{}", "\x00"]
CELLS += ["9" * 400]


def lines(chance):
    return [",".join(map(str, [step, 4 - step / 100, 1e-3, "ok"])) for step in range(1, chance.randint(2, 40))]


def damaged(chance):
    """A log that something has happened to, once or several times."""
    rows = [",".join(HEAD), *lines(chance)]
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(rows))
        cells = rows[at].split(",")
        what = chance.randrange(8)
        if what == 0:
            cells[chance.randrange(len(cells))] = chance.choice(CELLS)
            rows[at] = ",".join(cells)
        elif what == 1:
            rows[at] = rows[at][: chance.randrange(len(rows[at]) + 1)]
        elif what == 2:
            rows.insert(at, chance.choice(rows))
        elif what == 3:
            del rows[at]
        elif what == 4:
            rows[at] = rows[at].replace(",", chance.choice([";", "\t", ",,", ""]), 1)
        elif what == 5:
            rows[at:] = [row.replace(row.split(",")[1] if "," in row else "", "", 1) for row in rows[at:]]
        elif what == 6:
            rows[at] += chance.choice([",", ",7", '"', "\r", " "])
        else:
            rows[at] = chance.choice(['{"step": 1, "loss": 2}', "[1, 2]", "", " ", "# loss"])
        rows = rows or [""]
    return "\n".join(rows) + "\n" * chance.randrange(2)


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(1, 5))])
def test_nothing_of_a_log_is_dropped_in_silence(tmp_path, seed):
    chance, read = random.Random(seed), 0
    for count in range(1000):
        text = damaged(chance)
        (tmp_path / "log.csv").write_text(text, newline="")
        try:
            (curve,) = read_log(tmp_path / "log.csv")
        except CompareError:  # and nothing else
            continue
        read += 1
        head, *rows = csv.reader(io.StringIO(text), delimiter="\t" if "\t" in text.partition("\n")[0] else ",")
        head = [name.strip() for name in head]
        there = dict(zip(*(part.tolist() for part in curve.series["loss"]), strict=True))
        for place, cells in enumerate((cells for cells in rows if any(cells)), 1):
            if "loss" not in head:
                continue
            cell = cells[head.index("loss")].strip()
            step = round(float(cells[head.index("step")])) if "step" in head else place
            assert step in there or cell.lower() in EMPTY, (seed, count, text)
    assert read > 100


JSON_CELLS = [None, "nan", True, [3], {"other": 3}, "two", 10**400, -1, 2.5, "\ud800", ""]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(1, 5))])
def test_nothing_of_jsonl_is_dropped_in_silence(tmp_path, seed):
    chance, read = random.Random(seed), 0
    for count in range(500):
        rows = [{"step": step, "loss": 4 - step / 100, "lr": 1e-3} for step in range(1, chance.randint(2, 40))]
        for _ in range(chance.randint(0, 3)):
            row = chance.choice(rows)
            row[chance.choice(["loss", "lr"])] = chance.choice(JSON_CELLS)
        lines = [json.dumps(row) for row in rows]
        if chance.random() < 0.2:
            at = chance.randrange(len(lines))
            lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
        path = tmp_path / f"{count}.jsonl"
        path.write_text("\n".join(lines))
        try:
            (curve,) = read_log(path)
        except CompareError:
            continue
        read += 1
        losses = {json.loads(line)["step"]: json.loads(line).get("loss") for line in lines if line}
        absent = (None, "", {"other": 3})  # the last is a column of its own, loss/other
        numbers = {step: str(number(str(loss))) for step, loss in losses.items() if loss not in absent}
        steps, values = (part.tolist() for part in curve.series["loss"])
        assert dict(zip(steps, map(str, values), strict=True)) == numbers
    assert 50 < read < 450
