"""The interactive page of the documentation computes what the package computes: same seed, same digits, in a real browser."""

from pathlib import Path

import numpy as np
import pytest
from jaxtyping import config

from fedsieve import RunConfig, Simulation, initial_server, resolve, train
from fedsieve.data.builtin import load_digits
from fedsieve.experiments.config import FederationConfig

PAGE = Path(__file__).parents[2] / "docs" / "playground.html"
DIGITS, CLIENTS, SKEW, ROUNDS, SEED, DENSITY = 300, 3, 2.0, 3, 11, 0.1
"""Every client has more than 64 digits. With fewer, the Polyak step has no limit and amplifies rounding errors ten million times."""
FEDERATION = """async ([digits, numClients, alpha, rounds, seed, density]) => {
    const { train, test } = await loadDigits();
    const parts = distribute({ ...train, y: train.y.slice(0, digits) }, numClients, alpha, seed), clients = makeClients(train, parts);
    const measured = (races) => [...races].filter(Boolean).map(({ model, bytes }) => ({ bytes, accuracy: accuracy(model, test) }));
    const options = { density, rounds, seed, clients };
    return { parts, "flops-pa": measured(flopsPA(options)), "fed-avg": measured(fedAvg(options)) };
}"""


@pytest.fixture(scope="module")
def on_the_page(browser):
    page = browser.new_page()
    page.goto(PAGE.as_uri())
    found = page.evaluate(FEDERATION, [DIGITS, CLIENTS, SKEW, ROUNDS, SEED, DENSITY])
    page.close()
    return found


@pytest.mark.parametrize("algorithm", ["flops-pa", "fed-avg"])
def test_the_browser_and_the_package_agree_in_every_round(on_the_page, algorithm, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # at the speed a user meets; shapes are checked elsewhere
    federation = FederationConfig(clients=CLIENTS, participation=1.0)
    options = {"density": DENSITY, "rounds": ROUNDS, "seed": SEED, "precision": "double", "federation": federation}
    run = resolve(RunConfig(task="digits", algorithm_name=algorithm, algorithm={"batch_size": "all"}, **options))
    simulation = Simulation(run)
    (x, y), _, *_ = load_digits(None)
    order = np.concatenate(on_the_page["parts"])
    counts = np.array([len(part) for part in on_the_page["parts"]])
    simulation.dataset = simulation.dataset._replace(x=x[order], y=y[order], counts=counts)
    server = initial_server(run.algorithm, run.objective, run.seed, run.dtype)
    exchange, num_bytes = simulation.make_exchange(simulation.client_data, run.seed), 0
    rounds = train(run.algorithm, server, simulation.population, 1.0, exchange, rounds=ROUNDS, seed=run.seed, dtype=run.dtype)
    for result, shown in zip(rounds, on_the_page[algorithm], strict=True):
        num_bytes += result.uplink.total + result.downlink.total
        model = run.algorithm.parameters if algorithm == "flops-pa" else run.algorithm.unprojected_parameters
        assert simulation.evaluate(model(result.server))["accuracy"] == pytest.approx(shown["accuracy"], abs=0.01)
        assert num_bytes == pytest.approx(shown["bytes"], rel=0.001)


def test_the_page_has_the_digits_of_the_package(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    import embed_digits

    assert embed_digits.embedded_digits(PAGE.read_text()) == embed_digits.digits(), "run tools/embed_digits.py"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_page_trains_and_does_not_overflow(visit, width, scheme):
    page = visit(PAGE.as_uri(), width, scheme)
    page.evaluate("data.then(({ train }) => { train.y = train.y.slice(0, 100); })")
    page.get_by_label("density").fill("1")
    page.get_by_role("button").click()
    page.wait_for_function("document.querySelector('#dense-accuracy').textContent.endsWith('%')", timeout=60_000)
    assert page.locator("#density-text").inner_text() == "5 %: 32 weights"
    kept = "[...document.querySelectorAll('#masks canvas')].flatMap((c) => [...c.getContext('2d').getImageData(0, 0, 8, 8).data])"
    assert page.evaluate(f"{kept}.filter((v, i) => i % 4 === 3 && v > 0).length") == 32
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_is_short_and_asks_nobody():
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 400
    assert "http" not in text
