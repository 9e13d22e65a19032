"""fedht: Flower baseline for Fed-HT and FedIter-HT (Tong et al. 2022)."""
