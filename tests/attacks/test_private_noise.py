"""Attacks on differential privacy by somebody who sees all that is released, knows the seed, and knows all clients but one."""

import json
import os
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsieve.cli.main import main
from fedsieve.core.packets import Packet
from fedsieve.core.private_mean import GaussianMechanism, private_mean
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.random import secret_sampler, secret_words, server_sampler
from fedsieve.core.types import Clock, ExchangeResult, Traffic
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.experiments.config import FederationConfig, Precision
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import initial_state
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.runtime.privacy import Privacy, read_secret
from fedsieve.runtime.rounds import sample_cohort, train
from helpers.algorithms import make_algorithm
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
SECRET = bytes(range(32))
NUM_CLIENTS, VICTIM = 10, 3


def private_run(name="fed-avg", **settings):
    options = {"rounds": 1, "precision": Precision.DOUBLE, "privacy": Privacy(noise_multiplier=1.0)}
    options |= {"federation": FederationConfig(clients=NUM_CLIENTS, participation=1.0)}
    return small_run(name, **options | settings)


def start(run, exchange, **options):
    """The rounds of a run over another exchange."""
    simulation = Simulation(run)
    server = initial_state(run, simulation).server
    return train(run.algorithm, server, simulation.population, 1.0, exchange, run.rounds, run.seed, dtype=run.dtype, **options)


def recover_victim(run, noise_source):
    """Return the victim's clipped update, and what an attacker computes for it who believes that the noise has this source."""
    simulation, seen = Simulation(run), {}
    exchange = simulation.make_exchange(simulation.client_data, run.seed)

    def listening(clock, packet, clients):
        result = exchange(clock, packet, clients)
        seen.update(packet=packet, replies=list(result.replies))
        return result

    (result,) = start(run, listening, secret=SECRET)
    deltas = run.algorithm.client_deltas(seen["packet"], seen["replies"], run.dtype)
    silent = run.algorithm.privacy._replace(noise_multiplier=0.0)
    others = {name: torch.cat((stack[:VICTIM], stack[VICTIM + 1 :])) for name, stack in deltas.items()}
    draw = server_sampler(0, 0, 0, run.dtype)
    victim = private_mean({name: stack[VICTIM : VICTIM + 1] for name, stack in deltas.items()}, silent, None, draw)["theta"]
    known = private_mean(others, silent, None, draw)["theta"]
    believed = private_mean({name: stack[:0] for name, stack in deltas.items()}, run.algorithm.privacy, None, noise_source)["theta"]
    sent = seen["packet"].field_dense("theta", run.dtype)
    return victim, result.server.theta - sent - known - believed


def cosine(one, other):
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def test_the_noise_cannot_be_removed_with_the_public_seed():
    run = private_run(algorithm=replace(make_algorithm("fed-avg"), bits=32))
    for seed in (run.seed, 0):
        victim, guess = recover_victim(run, server_sampler(seed, 0, 0, run.dtype))
        assert abs(cosine(victim, guess)) < 0.5
        assert float(guess.norm()) > 3 * float(victim.norm())
    victim, guess = recover_victim(run, secret_sampler(SECRET, 0, 0, run.dtype))
    assert cosine(victim, guess) > 0.99999  # the same attack succeeds for whoever holds the secret


def test_no_private_broadcast_is_a_seed_and_cohorts_do_not_follow_from_it():
    run, packets = private_run(rounds=3), []

    def silent(clock, packet, clients):
        packets.append(packet)
        return ExchangeResult([], [], Traffic(), Traffic())

    list(start(run, silent, secret=SECRET))
    assert len(packets) == 3 and all(packet.seed is None and packet.fields for packet in packets)
    by_seed = [sample_cohort(range(50), 10, 0, t) for t in range(30)]
    by_secret = [sample_cohort(range(50), 10, 0, t, SECRET) for t in range(30)]
    assert by_secret != by_seed and by_secret == [sample_cohort(range(50), 10, 9, t, SECRET) for t in range(30)]
    counts = np.bincount([c for t in range(2000) for c in sample_cohort(range(20), 5, 0, t, SECRET)], minlength=20)
    assert abs(counts - 500).max() < 5 * 500**0.5
    assert all(len(set(cohort)) == 10 for cohort in by_secret)


def test_a_private_run_repeats_only_with_its_secret():
    run = private_run("sieve", rounds=2)
    first, again, other = (train_run(run, secret)[-1].parameters for secret in (SECRET, SECRET, bytes(32)))
    assert torch.equal(first, again) and not torch.equal(first, other)
    unknown = [train_run(run, None)[-1].parameters for _ in range(2)]
    assert not torch.equal(*unknown)


def test_privacy_without_a_secret_is_refused():
    run = private_run()
    with pytest.raises(ValueError, match="draws its noise from a secret"):
        next(start(run, lambda *_: None))
    with pytest.raises(ValueError, match="draws its noise from a secret"):
        next(start(small_run("fed-avg"), lambda *_: None, secret=SECRET))


@pytest.mark.parametrize("name", ["fed-avg", "fed-sgd", "flops", "flops-pa", "sieve", "fed-iter-ht", "random-mask"])
def test_a_round_without_replies_adds_its_noise(name):
    run = private_run(name)

    def silent(clock, packet, clients):
        return ExchangeResult([], [], Traffic(), Traffic())

    before = initial_state(run, Simulation(run)).server
    (result,) = start(run, silent, secret=SECRET)
    moved = run.algorithm.unprojected_parameters(result.server) - run.algorithm.unprojected_parameters(before)
    assert torch.isfinite(moved).all() and float(moved.norm()) > 0
    assert result.replied == []


def test_empty_and_short_stacks_have_the_same_noise():
    mechanism = GaussianMechanism(1.5, 0.5, 1.0, 10)
    draw = secret_sampler(SECRET, 0, 0, torch.float64)
    empty, one = (private_mean({"theta": torch.zeros(k, 50, dtype=torch.float64)}, mechanism, None, draw)["theta"] for k in (0, 1))
    torch.testing.assert_close(empty, one)


def test_the_rate_of_sieve_does_not_show_how_many_replied():
    """Replies that say nothing new: however many there are, the server does the same."""
    run = private_run("sieve")
    server = initial_state(run, Simulation(run)).server
    clock = Clock(0, 10)
    packet = run.algorithm.broadcast(server, clock, server_sampler(0, 0, 0, run.dtype))
    simulation = Simulation(run)
    replies = list(
        simulation.make_exchange(simulation.client_data, run.seed)(clock, packet, simulation.population.clients_with_data[:3]).replies
    )
    still = [reply._replace(packet=zero_update(reply.packet, packet)) for reply in replies]
    states = [run.algorithm.aggregate(server, packet, still[:k], clock, secret_sampler(SECRET, 0, 0, run.dtype)) for k in (0, 1, 3)]
    for state in states[1:]:
        torch.testing.assert_close(state.weights, states[0].weights)


def zero_update(reply: Packet, sent: Packet) -> Packet:
    """The reply of a client that did not move: no update, and the gates of the broadcast."""
    fields = {
        name: QuantizedField(torch.zeros_like(values.codes, dtype=torch.float32), None, Coding.FLOAT32)
        for name, values in reply.fields.items()
    }
    return reply._replace(fields=fields, scalars={name: sent.scalars[name] for name in reply.scalars})


def test_the_secret_stream_is_uniform_and_depends_on_all_of_its_path():
    words = secret_words(SECRET, 4096, "a", 1)
    assert not np.array_equal(words, secret_words(SECRET, 4096, "a", 2))
    assert not np.array_equal(words, secret_words(bytes(32), 4096, "a", 1))
    uniform = secret_sampler(SECRET, 0, 0, torch.float64)("x", 100_000)
    assert 0 < float(uniform.min()) and float(uniform.max()) < 1
    assert abs(float(uniform.mean()) - 0.5) < 5 / (12 * 100_000) ** 0.5


# The file


SMALL = [
    "--data.num-examples",
    "200",
    "--data.num-features",
    "30",
    "--federation.clients",
    "8",
    "--density",
    "0.1",
    "--algorithm",
    "fed-avg",
]
QUICK = ["train", *SMALL, "--rounds", "2", "--algorithm.local-steps", "2", "--privacy.noise-multiplier", "1", "--quiet"]


def test_the_secret_is_a_file_of_the_owner_and_appears_nowhere_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, "--out", "run"]) == 0
    key = tmp_path / "run" / "privacy.key"
    secret = key.read_bytes()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(secret) == 32
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path != key:
            assert secret not in path.read_bytes() and secret.hex().encode() not in path.read_bytes()
    assert main([*QUICK, "--out", "other"]) == 0
    assert (tmp_path / "other" / "privacy.key").read_bytes() != secret
    results = [json.loads((tmp_path / name / "result.json").read_text())["value"] for name in ("run", "other")]
    assert results[0] != results[1]
    assert main([*QUICK, "--out", "again", "--secret-file", "run/privacy.key"]) == 0
    assert not (tmp_path / "again" / "privacy.key").exists()
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert models[0] == models[1]
    assert main(["train", "--resume", "run", "--rounds", "3", "--quiet"]) == 0
    key.unlink()
    assert main(["train", "--resume", "run", "--rounds", "4", "--quiet"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_secret_that_others_know_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="at least 32 random bytes"):
        read_secret(path)
    path.write_bytes(os.urandom(32))
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        read_secret(path)


def test_a_secret_file_without_privacy_is_refused(tmp_path, capsys):
    assert main(["train", *SMALL, "--rounds", "1", "--secret-file", str(tmp_path / "key")]) == 2
    assert "has no effect without privacy.noise-multiplier" in capsys.readouterr().err


def test_privacy_in_a_flower_deployment_is_refused_in_one_line():
    objective = Linear(loss=Loss.SQUARED, num_features=5, num_outputs=1)
    with pytest.raises(ValueError, match=r"privacy.noise-multiplier: a Flower deployment has no differential privacy"):
        deployment_config({"clients": 2, "privacy.noise-multiplier": 1.0}, objective)
