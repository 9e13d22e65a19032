"""Graphs connect, mixing averages, and one function per topology is enough."""

from math import cos, log2, pi

import numpy as np
import pytest

from fedsieve.core.topology import GRAPHS, make_topology, parse_edge_list, spread, without_nodes

ALL = [(name, one_peer) for name in GRAPHS for one_peer in (False, True)]


def topology(name, num_nodes, one_peer=False):
    return make_topology(name, GRAPHS[name](num_nodes, None, 0), num_nodes, one_peer=one_peer)


@pytest.mark.parametrize(("name", "one_peer"), ALL)
def test_mixing_steps_keep_the_mean_and_never_amplify(name, one_peer):
    for num_nodes in (2, 7, 16):
        for step in topology(name, num_nodes, one_peer).steps:
            assert np.allclose(step.matrix.sum(0), 1) and np.allclose(step.matrix.sum(1), 1)
            assert (step.matrix >= 0).all()


@pytest.mark.parametrize(("name", "one_peer"), ALL)
def test_repeated_mixing_reaches_the_mean_at_the_rate_of_the_gap(name, one_peer):
    graph, values = topology(name, 16, one_peer), np.random.default_rng(0).standard_normal(16)
    mixed, num_cycles = values, 5
    for number in range(num_cycles * len(graph.steps)):
        mixed = graph.step(number).matrix @ mixed
    bound = (1 - graph.spectral_gap) ** (num_cycles * len(graph.steps)) * np.linalg.norm(values - values.mean())
    assert np.linalg.norm(mixed - values.mean()) <= bound + 1e-12


def test_gaps_have_their_closed_forms():
    assert topology("ring", 16).spectral_gap == pytest.approx(1 - (1 + 2 * cos(2 * pi / 16)) / 3)
    assert topology("complete", 16).spectral_gap == pytest.approx(1)
    assert topology("exponential", 16).spectral_gap == pytest.approx(2 / (1 + log2(16)))  # Ying et al. 2021, arXiv 2110.13363


def test_one_peer_exponential_graphs_average_exactly_in_log2_n_steps():
    product = np.eye(16)
    for step in topology("exponential", 16, one_peer=True).steps:
        product = step.matrix @ product
    assert np.allclose(product, 1 / 16)


@pytest.mark.parametrize("name", GRAPHS)
def test_one_peer_uses_every_link_once_and_one_sender_per_node(name):
    links = GRAPHS[name](11, None, 0)
    steps = make_topology(name, links, 11, one_peer=True).steps
    used = [(int(s), i) for step in steps for i, (s, w) in enumerate(zip(step.senders[:, 0], step.weights[:, 0], strict=True)) if w > 0]
    assert sorted(used) == sorted(links)
    assert all(step.senders.shape[1] == 1 for step in steps)


def test_news_crosses_a_ring_in_half_its_length():
    assert topology("ring", 10).flooding_steps == 5
    assert topology("complete", 10).flooding_steps == 1


def test_absent_nodes_neither_send_nor_receive():
    absent = np.array([True, *[False] * 6])
    step = without_nodes(topology("complete", 7).steps[0], absent)
    assert np.array_equal(step.matrix[0], np.eye(7)[0]) and np.array_equal(step.matrix[:, 0], np.eye(7)[0])
    assert np.allclose(step.matrix.sum(1), 1)
    assert not spread(step, np.eye(7, dtype=bool))[1, 0]


def test_an_edge_list_is_the_graph_it_names():
    assert parse_edge_list("# triangle\n0 1\n1,2\n\n2 0 # back\n", "f") == GRAPHS["ring"](3, None, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0 1\n2 3", "not connected"), ("0 one", "line 1"), ("", "no edges"), ("0 9", "has a node 9"), ("0 0", "no edges")],
)
def test_a_bad_edge_list_is_refused_with_its_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        make_topology("f", parse_edge_list(text, "f"), 4)


def test_a_graph_without_links_is_not_connected():
    with pytest.raises(ValueError, match="not connected"):
        make_topology("erdos-renyi", GRAPHS["erdos-renyi"](5, 1e-9, 0), 5)


def test_one_node_is_refused():
    with pytest.raises(ValueError, match="at least 2 nodes"):
        make_topology("ring", set(), 1)
