"""Names and descriptions of the studies. Does not import torch."""

PAPER_STUDIES = {
    "table-1": "Table 1 (L214-240): FLoPS(0.05), FLoPS(0.95) and FedIter-HT on 5 % truth, non-IID",
    "table-2": "Table 2 (L244-276): FLoPS and FedIter-HT, true density .05 and .95, IID and non-IID",
    "gates": "figure (L278-299): expected gates of FLoPS per epoch on LR, LG, MC",
    "iou": "figure (L305-323): overlap of gates and masks between epochs, FLoPS and FedIter-HT",
    "learning-rates": "figure (L325-343): FLoPS-PA over learning rates of weights and gates",
    "convergence": "figure (L344-365): FLoPS-PA, FedIter-HT, FedAvg, Central on LR, LG and many instances",
    "real-data": "figure (L373-396): RCV1, MNIST (softmax, LeNet), EMNIST",
    "test-time-gates": "appendix (L520-536): test-time gates over epochs and their soft IoU",
    "regimes": "appendix (L540-600): TDR in the other three regimes of noise and correlation",
    "heterogeneity": "claim (L128): density and loss against the dense model under heterogeneity, FLoPS and FLoPS-PA",
    "communication": "bytes (L303) of each algorithm: the paper's formula, payload and wire; quality against bytes",
    "starts": "claim (L140, L607): dense and sparse starts, scaling rate and prune start, FLoPS and FLoPS-PA",
    "constraint": "claim (L299): density and multiplier without log-alpha scaling: does the L0 constraint hold by itself?",
}
PACKAGE_STUDIES = {
    "equal-bytes": "sieve with its defaults against algorithms tuned on other seeds, all at the bytes that sieve sends",
    "rivals": "every algorithm tuned with six trials: compressors with error feedback, masks and dense models, at equal bytes and density",
    "ablation": "sieve with one part changed at a time: the effect of gates, error feedback, signs and polishing",
    "tables": "tables that other people published, in their settings: their numbers, their algorithms run here, ours, and all bytes",
    "topologies": "without a server: nodes on graphs against a star, bytes per node, spectral gap, absent nodes",
    "robustness": "quality and TDR with 0 to 30 % malicious clients, under the weighted mean and the robust aggregators",
}
STUDIES = PAPER_STUDIES | PACKAGE_STUDIES
