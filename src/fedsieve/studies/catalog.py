"""The studies by the name a user types, and what each shows. No torch here."""

PAPER_STUDIES = {
    "table-1": "Table 1 (L214-240): FLoPS(0.05), FLoPS(0.95) and FedIter-HT on 5 % truth, non-IID",
    "table-2": "Table 2 (L244-276): FLoPS and FedIter-HT, true density .05 and .95, IID and non-IID",
    "gates": "figure (L278-299): expected gates of FLoPS per epoch on LR, LG, MC",
    "iou": "figure (L305-323): overlap of gates and masks between epochs, FLoPS and FedIter-HT",
    "learning-rates": "figure (L325-343): FLoPS-PA over rates of weights and gates",
    "convergence": "figure (L344-365): FLoPS-PA, FedIter-HT, FedAvg, Central on LR, LG and many instances",
    "real-data": "figure (L373-396): RCV1, MNIST (softmax, LeNet), EMNIST",
    "test-time-gates": "appendix (L520-536): test-time gates over epochs and their soft IoU",
    "regimes": "appendix (L540-600): TDR over the other three regimes of noise and correlation",
    "communication": "bytes (L303): the paper's formula, payload and wire of each method; quality against bytes",
    "starts": "claim (L140, L607): dense and sparse starts, scaling rate and prune start, FLoPS and FLoPS-PA",
}
PACKAGE_STUDIES = {
    "equal-bytes": "sieve as it comes, rivals tuned alike on other seeds, at the bytes sieve needs: who leads where, and by how much",
    "ablation": "sieve with one of its parts taken away or done otherwise: what gates, memory, signs, polishing are worth",
    "robustness": "accuracy and TDR with 0 to 30 % of the clients lying or broken, under the plain and the robust means",
    "constraint": "density and multiplier per round without log-alpha scaling: does the L0 constraint hold by itself?",
}
STUDIES = PAPER_STUDIES | PACKAGE_STUDIES
