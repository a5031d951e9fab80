"""The DFlash drafter: configuration, anchors, blocks, model, loss and metrics. Modules are imported by name."""
