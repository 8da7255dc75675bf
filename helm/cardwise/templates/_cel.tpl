{{/*
CEL that several objects share. In CEL, because it is evaluated by the API server itself: a pod that is none of ours
never depends on the webhook. Lists from the values are rendered as CEL lists; the schema keeps quotes out of them.
*/}}
{{- define "cardwise.cel.list" -}}
[{{- range $i, $item := . }}{{ if $i }}, {{ end }}'{{ $item }}'{{ end -}}]
{{- end }}

{{/* Whether the resource `k` is one that users ask for, or any of our own domain. */}}
{{- define "cardwise.cel.ourResource" -}}
k in ['aliyun.com/gpu-mem', 'aliyun.com/gpu-count', 'aliyun.com/gpu-core.percentage'] || k.startsWith('cardwise.dev/')
{{- end }}

{{/* Whether the container `c` asks for a resource of ours. */}}
{{- define "cardwise.cel.containerAsks" -}}
has(c.resources) && (
  (has(c.resources.limits) && c.resources.limits.exists(k, {{ include "cardwise.cel.ourResource" . }})) ||
  (has(c.resources.requests) && c.resources.requests.exists(k, {{ include "cardwise.cel.ourResource" . }})))
{{- end }}

{{/* Whether the pod `object` asks for a resource of ours anywhere. dyn: the type checker of policies knows no limits. */}}
{{- define "cardwise.cel.asks" -}}
(dyn(object.spec.containers).exists(c,
  {{- include "cardwise.cel.containerAsks" . | nindent 2 }}) ||
(has(object.spec.initContainers) && dyn(object.spec.initContainers).exists(c,
  {{- include "cardwise.cel.containerAsks" . | nindent 2 }})))
{{- end }}

{{/*
Static pods are the node's: their mirrors must pass as they are. By the word of a kubelet only, else any user could pass
everything by writing the annotation.
*/}}
{{- define "cardwise.cel.notMirror" -}}
!(has(object.metadata.annotations) && 'kubernetes.io/config.mirror' in object.metadata.annotations && request.userInfo.username.startsWith('system:node:'))
{{- end }}

{{/* Whether the annotation `k` may be written by Cardwise only. As cardwise/core/names.py is_placement_annotation. */}}
{{- define "cardwise.cel.placementKey" -}}
k.startsWith('ALIYUN_COM_GPU_MEM_') || k.startsWith('scheduler.framework.gpushare.allocation') || (k.startsWith('cardwise.dev/') && !(k in ['cardwise.dev/policy', 'cardwise.dev/one-best-node', 'cardwise.dev/defaults']))
{{- end }}

{{/* Whether the pod `object` is no infrastructure (DCGM, the GPU operator), which manages cards itself. */}}
{{- define "cardwise.cel.notInfrastructure" -}}
!(request.namespace in {{ include "cardwise.cel.list" .Values.policies.infrastructure.namespaces }}) &&
!((request.namespace + '/' + (has(object.spec.serviceAccountName) ? object.spec.serviceAccountName : 'default')) in {{ include "cardwise.cel.list" .Values.policies.infrastructure.serviceAccounts }})
{{- end }}

{{/* Whether the container `c` sets nothing that opens cards. The webhook's own entry is a fieldRef, on containers
that hold a share slot; ephemeral containers hold none. */}}
{{- define "cardwise.cel.environment" -}}
has(c.env) && c.env.exists(e, e.name.startsWith('CUDA_MPS_') || (e.name == 'NVIDIA_VISIBLE_DEVICES' && !(
  has(e.valueFrom)
    ? (has(e.valueFrom.fieldRef) && e.valueFrom.fieldRef.fieldPath.startsWith("metadata.annotations['cardwise.dev/devices.") &&
       has(c.resources) && has(c.resources.limits) && 'cardwise.dev/share' in c.resources.limits)
    : (!has(e.value) || e.value in ['', 'void', 'none']))))
{{- end }}
