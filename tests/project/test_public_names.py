import fedsieve


def test_every_public_name_can_be_imported():
    for name in fedsieve.__all__:
        assert getattr(fedsieve, name) is not None


def test_a_name_that_is_not_public_is_refused():
    assert not hasattr(fedsieve, "nonsense")


def test_the_public_names_are_these():
    assert set(fedsieve.__all__) == {
        "METHODS",
        "Batch",
        "Batched",
        "FederationConfig",
        "Linear",
        "Loop",
        "Loss",
        "PacketError",
        "Population",
        "Simulation",
        "Rows",
        "RunConfig",
        "SparseFederatedClassifier",
        "SparseFederatedRegressor",
        "Synthetic",
        "__version__",
        "algorithm_class",
        "run_rounds",
        "fit",
    }
