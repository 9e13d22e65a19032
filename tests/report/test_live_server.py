"""The page of a run under way: served to this machine alone, read-only, and fresh."""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from fedsieve.cli.main import main
from fedsieve.report.html.live_server import create_server


@pytest.fixture
def under_way(runs, tmp_path):
    """A run after two of its four rounds, and its server; the lines still to come."""
    place = tmp_path / "run"
    shutil.copytree(runs / "lr", place)
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    for name in ("result.json", "model.safetensors", "supports.npz", "report.html"):
        (place / name).unlink()
    (place / "metrics.jsonl").write_text("".join(lines[:2]))
    made = create_server(place, 0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield place, made.server_address[1], lines[2:]
    made.shutdown()
    thread.join()
    made.server_close()


def ask(port, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_every_round_shows(under_way):
    place, port, rest = under_way
    status, body = ask(port, "/state")
    before = json.loads(body)
    assert status == 200 and before["round"] == 2 and not before["done"]
    status, body = ask(port, "/")
    assert status == 200 and b"2 of 4" in body and b"connect-src 'self'" in body
    with (place / "metrics.jsonl").open("a") as file:
        file.write(rest[0])
    after = json.loads(ask(port, "/state")[1])
    assert after["round"] == 3 and after["stamp"] != before["stamp"]
    assert b"3 of 4" in ask(port, "/")[1]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example", "[::1]"])
def test_other_hosts_are_refused(under_way, host):
    _, port, _ = under_way
    status, body = ask(port, "/", host)
    assert status == 403 and b"<html" not in body
    assert ask(port, "/state", host)[0] == 403


def test_this_machine_may_call_itself_localhost(under_way):
    _, port, _ = under_way
    assert ask(port, "/state", f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(under_way, method):
    _, port, _ = under_way
    assert ask(port, "/", method=method)[0] == 501


@pytest.mark.parametrize("path", ["/config.toml", "/../secret", "/state/", "/?x"])
def test_nothing_else_is_served(under_way, path):
    _, port, _ = under_way
    assert ask(port, path)[0] == 404


def test_a_damaged_run_is_said_and_the_server_goes_on(under_way):
    place, port, _ = under_way
    whole = (place / "metrics.jsonl").read_text()
    (place / "metrics.jsonl").write_text("nonsense\n" + whole)
    status, body = ask(port, "/")
    assert status == 503 and b"damaged in line 1" in body
    (place / "metrics.jsonl").write_text(whole)
    assert ask(port, "/")[0] == 200


def test_it_listens_on_loopback_only(under_way):
    _, port, _ = under_way
    for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}:
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection((address, port), timeout=2).close()


def test_a_port_in_use_and_a_missing_folder_are_one_line(runs, under_way, capsys, tmp_path):
    _, port, _ = under_way
    assert main(["watch", str(runs / "lr"), "--port", str(port)]) == 2
    assert main(["watch", str(runs / "lr"), "--port", "99999999"]) == 2
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 3 and f"--port {port} cannot be used" in said and "does not exist" in said


def test_an_interrupt_ends_it_cleanly(runs):
    # A shell's background jobs ignore interrupts, and so would this one if the suite runs in one.
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fedsieve.cli.main import main
sys.exit(main(["watch", {str(runs / "lr")!r}, "--port", "0"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(2)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and out == "stopped\n" and err == ""
