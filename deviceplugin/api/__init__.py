"""Generated messages of the gRPC interfaces of a node. Input: bytes. Output: messages, and the reverse.

The `.proto` files are written from the public APIs of Kubernetes, with only what Cardwise uses of the CRI; `make proto`
generates the `_pb2.py` files, which are committed. No stubs and servicers are generated: `plugin.serving` serves, and
`sources.calls` calls, by the services' descriptions in the messages' modules.

    deviceplugin_v1beta1.proto   k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1; Registration is served by the kubelet
    dra_v1.proto                 k8s.io/kubelet/pkg/apis/dra/v1 (1.37; the same in 1.34)
    pluginregistration_v1.proto  k8s.io/kubelet/pkg/apis/pluginregistration/v1
    podresources_v1.proto        k8s.io/kubelet/pkg/apis/podresources/v1, served by the kubelet
    cri_v1.proto                 k8s.io/cri-api/pkg/apis/runtime/v1, served by containerd and CRI-O
"""
