"""The live page: what its server answers, to whom, and that it keeps up with the record."""

import http.client
import json
import socket
import threading
from contextlib import contextmanager

import pytest

from halfstep.core.errors import OptionError, RunFolderError
from halfstep.report.watch import LivePage, Server
from halfstep.training.telemetry.events import EventsError, Follower
from tests.report.page.made_up_runs import run, step


def lines(events):
    return "".join(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "a-run"
    made.mkdir()
    (made / "events.jsonl").write_text(lines(run(20, finished=False)))
    (made / "run.toml").write_text('policy = "fp32"')
    return made


@contextmanager
def served(folder, port=0):
    with Server(LivePage(folder), port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_the_page_is_served_and_made_again_when_the_record_grows(folder):
    with served(folder) as server:
        status, html, headers = ask(server)
        assert status == 200
        assert "for 20 of" in html
        assert "connect-src 'self'" in html
        tag = headers["ETag"]
        assert ask(server, If_None_Match=tag)[:2] == (304, "")
        assert ask(server, method="HEAD")[:2] == (200, "")
        with open(folder / "events.jsonl", "a") as record:
            line = lines([step(21, 1e9)])
            record.write(line[:30])  # being written: a line that has not ended yet
            record.flush()
            assert ask(server, If_None_Match=tag)[0] == 304
            record.write(line[30:])
        status, html, headers = ask(server, If_None_Match=tag)
        assert status == 200
        assert "for 21 of" in html
        assert headers["ETag"] != tag


def test_it_listens_on_this_machine_alone_and_answers_to_its_own_name(folder):
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        for host in ("localhost:{}", "127.0.0.1:{}"):
            assert ask(server, Host=host.format(port))[0] == 200
        for host in (
            "evil.example",
            "evil.example:{}",
            "127.0.0.1",
            "localhost:1",
            "127.0.0.1:{}.evil.example",
            "",
        ):
            status, text, _ = ask(server, Host=host.format(port))
            assert status == 421
            assert "20 steps" not in text


@pytest.mark.parametrize(
    "path", ["/run.toml", "/events.jsonl", "/../secret", "/%2e%2e/secret", "//etc/passwd", "/?x", "*", "http://x/"]
)
def test_nothing_but_the_page_is_served(folder, path):
    (folder.parent / "secret").write_text("hidden")
    with served(folder) as server:
        status, text, headers = ask(server, path)
        assert status in (404, 421)
        assert "hidden" not in text
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert ask(server, method="POST")[0] == 501


def test_a_port_that_is_taken_is_named(folder):
    with served(folder) as server, pytest.raises(OptionError, match=f"{server.server_port}"):
        Server(LivePage(folder), server.server_port)


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "events.jsonl").symlink_to(folder / "events.jsonl")
    with pytest.raises(RunFolderError):
        LivePage(other)
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert LivePage(linked).current()[0].startswith(b"<!doctype html>")


def test_damage_is_skipped_and_named(folder):
    (folder / "events.jsonl").write_text(lines(run(5)))
    with served(folder) as server:
        with open(folder / "events.jsonl", "a") as record:
            record.write("damage\n")
        status, text, _ = ask(server)
        assert status == 200
        assert "events.jsonl:8: this line is not JSON" in text


def test_a_record_that_is_replaced_is_not_mixed_with_the_old_one(folder):
    record = folder / "events.jsonl"
    follower = Follower(record)
    assert len(list(follower.new())) == 23
    assert list(follower.new()) == []
    record.write_text(lines(run(2)))
    with pytest.raises(EventsError):
        list(follower.new())


def test_a_client_that_says_nothing_holds_nobody_up(folder):
    with served(folder) as server, socket.create_connection(("127.0.0.1", server.server_port)):
        assert ask(server)[0] == 200
