"""Cardwise: what its parts share. The parts themselves are webhook, extender, deviceplugin and mps."""
