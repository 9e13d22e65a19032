"""A malicious client under the default aggregation."""

from dataclasses import replace

import pytest
import torch

from fedsieve.experiments.config import FederationConfig, Precision
from fedsieve.runtime.attacks import Attack
from fedsieve.runtime.failures import Failures, sample_malicious_clients
from helpers.runs import small_run, train_run


@pytest.mark.parametrize("name", ["sieve", "flops-pa", "fed-avg", "fed-iter-ht", "fed-ef"])
def test_the_aggregate_does_not_depend_on_how_far_the_longest_reply_goes(name):
    federation = FederationConfig(clients=20, participation=1.0, alpha=1000.0, max_norm_ratio=1e9)
    run = small_run(name, rounds=1, precision=Precision.DOUBLE, federation=federation)
    attacks = [Failures(malicious_fraction=0.05, attack=Attack.SCALE, attack_scale=scale) for scale in (1e3, 1e5)]
    near, far = (train_run(replace(run, failures=failures))[-1] for failures in attacks)
    malicious = sample_malicious_clients(attacks[0], range(20), run.seed)
    assert len(malicious & set(near.result.replied)) == 1
    torch.testing.assert_close(near.parameters, far.parameters, rtol=1e-4, atol=1e-5)
