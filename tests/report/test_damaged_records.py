"""Records of runs with random damage: a page names each line that it skips, or there is none."""

import json
import random

import pytest

from halfstep.core.errors import HalfstepError
from halfstep.report.page import write
from halfstep.report.watch import LivePage
from halfstep.training.telemetry.events import EventsError, stream_events
from tests.report.page.made_up_runs import FP16

VALUES = [None, True, -1, 0, 1e308, 10**30, 10**400, "", "nan", "inf", "x" * 9, [], {}, [[1]], {"a": {"b": 1}}]


def damaged(chance, whole):
    """The lines of a record that something has happened to, once or several times."""
    lines = list(whole)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        line, what = lines[at], chance.randrange(6)
        if what == 0:
            event = json.loads(chance.choice(whole))
            place = event
            while isinstance(place, dict) and place:
                key = chance.choice(list(place))
                if not isinstance(place[key], dict) or chance.random() < 0.3:
                    place[key] = chance.choice(VALUES)
                    break
                place = place[key]
            lines[at] = json.dumps(event)
        elif what == 1:
            lines[at] = line[: chance.randrange(len(line) + 1)]
        elif what == 2:
            spot = chance.randrange(len(line) + 1)
            lines[at] = line[:spot] + chance.choice(["\x00", '"', "{", "9" * 400, "é", "\\"]) + line[spot:]
        elif what == 3:
            del lines[at]
        elif what == 4:
            lines.insert(at, chance.choice(lines))
        else:
            lines[at] = chance.choice(["", "[]", "null", "{}", '{"event": "unheard"}', line + line])
        lines = lines or [""]
    return lines


def is_whole(line, folder):
    (folder / "line.jsonl").write_text(line + "\n", encoding="utf-8", newline="")
    try:
        list(stream_events(folder / "line.jsonl"))
    except EventsError:
        return False
    return True


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(1, 26))])
def test_a_page_skips_no_line_in_silence(tmp_path, seed):
    """2,500 records, and a sample of 25."""
    chance, records, made = random.Random(seed), 100 if seed else 25, 0
    whole = [json.dumps(event) for event in FP16[:30]]
    record, page = tmp_path / "events.jsonl", tmp_path / "page.html"
    for count in range(records):
        lines = damaged(chance, whole)
        record.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
        try:
            write(record, page)
            live, _ = LivePage(tmp_path).current()
        except HalfstepError:  # and nothing else
            continue
        made += 1
        good = {number for number, line in enumerate(lines, 1) if is_whole(line, tmp_path)}
        # A page begins anew at a start that resumes nothing.
        begun = max(number for number in good if json.loads(lines[number - 1])["event"] == "start")
        bad = [number for number in range(begun, len(lines) + 1) if number not in good]
        for html in (page.read_text(encoding="utf-8"), live.decode()):
            assert [n for n in bad if f"events.jsonl:{n}: " not in html] == [], (seed, count)
    assert made > records / 4
