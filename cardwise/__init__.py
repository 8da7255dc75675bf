"""Cardwise: what its parts share. The parts themselves are webhook, extender, deviceplugin and mps.

Comes in: objects of the API server, and what a node's hardware says. Goes out: values and decisions of the domain, and
clients, watches and servers that parts are made of. Read first: `core`.

The modules:

    core        the domain, pure: requests, placement, gangs, preemption
    kube        Kubernetes: client, watches, leases, events
    runtime     what a process is started with: settings, logs, HTTP server, certificates
    gpus        the cards of a node; `devices`: its other devices
    cli         the command line; `simulation`: what its `simulate` runs
    share       what containers learn about their share
    clock       the clock, which is handed in; `supervision`: daemon threads that no exception ends
    programs    the entry points on PATH
"""
