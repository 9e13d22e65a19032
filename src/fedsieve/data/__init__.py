"""Where rows come from and how they fall on clients."""
