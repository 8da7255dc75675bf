"""Cardwise: the code that its components share. The components are webhook, extender, deviceplugin and mps.

Input: objects of the API server, and a node's hardware. Output: the domain's values and decisions, and the API clients,
watches and HTTP servers that all components use. Read first: `core`.

The modules:

    core        the domain, pure: requests, placement, gangs, preemption
    kube        Kubernetes: client, watches, leases, events
    runtime     the base of a process: settings, logs, HTTP server, certificates
    gpus        the cards of a node; `devices`: its other devices
    cli         the command line; `simulation`: the simulator of its `simulate`; `web`: the page of `cardwise web`
    share       a container's view of its own share
    clock       the clock, which callers pass in; `supervision`: daemon threads that survive exceptions
    programs    the entry points on PATH
"""
