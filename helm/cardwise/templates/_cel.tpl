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

{{/*
Whether the resource `k` is a bare name, which Kubernetes would refuse: it has no domain and is none of its own. The
webhook knows which of them are ResourceClasses.
*/}}
{{- define "cardwise.cel.bareName" -}}
!k.contains('/') && !(k in ['cpu', 'memory', 'storage', 'ephemeral-storage']) && !k.startsWith('hugepages-')
{{- end }}

{{/* The same for a key of a ResourceQuota's spec.hard, where Kubernetes has more names of its own. */}}
{{- define "cardwise.cel.bareQuotaName" -}}
{{ include "cardwise.cel.bareName" . }} && !k.startsWith('requests.') && !k.startsWith('limits.') && !(k in ['pods', 'services', 'secrets', 'configmaps', 'persistentvolumeclaims', 'replicationcontrollers', 'resourcequotas', 'services.loadbalancers', 'services.nodeports'])
{{- end }}

{{/* Whether the pod spec `spec` has a container with a limit or request `k` for which `key` holds. dyn: the type checker
of policies knows no limits. null: what of a template without containers, which Kubernetes refuses later. */}}
{{- define "cardwise.cel.containersHave" -}}
{{- $spec := .spec -}}{{- $key := .key -}}
(
{{- range $i, $field := list "containers" "initContainers" }}
  {{- if $i }} ||{{ end }}
  (has({{ $spec }}.{{ $field }}) && dyn({{ $spec }}.{{ $field }}) != null && dyn({{ $spec }}.{{ $field }}).exists(c, has(c.resources) && (
    (has(c.resources.limits) && c.resources.limits.exists(k, {{ $key }})) ||
    (has(c.resources.requests) && c.resources.requests.exists(k, {{ $key }})))))
{{- end }})
{{- end }}

{{/* Whether the pod `object` asks for a resource of ours anywhere, as it does after the webhook. */}}
{{- define "cardwise.cel.asks" -}}
{{ include "cardwise.cel.containersHave" (dict "spec" "object.spec" "key" (include "cardwise.cel.ourResource" .)) }}
{{- end }}

{{/* Whether the pod `object` asks for a card in any of the spellings that the webhook rewrites. */}}
{{- define "cardwise.cel.isOurs" -}}
{{- $key := printf "%s || (%s)" (include "cardwise.cel.ourResource" .) (include "cardwise.cel.bareName" .) -}}
{{- if eq .Values.webhook.nvidiaGpu "take" }}{{ $key = printf "%s || k == 'nvidia.com/gpu'" $key }}{{ end -}}
({{ include "cardwise.cel.annotated" "cardwise.dev/class" }} ||
{{ include "cardwise.cel.containersHave" (dict "spec" "object.spec" "key" $key) }})
{{- end }}

{{/*
Whether the webhook has to see the workload whose pod template's spec is at `path`. nvidia.com/gpu only where it is new:
Kubernetes takes it as it is and each pod is rewritten anyway, so no update of anything else may change a template (that
of a Job never can be; that of a Deployment would roll out).
*/}}
{{- define "cardwise.cel.templateIsOurs" -}}
{{- $bare := dict "spec" "s" "key" (include "cardwise.cel.bareName" .root) -}}
{{- $nvidia := dict "spec" "s" "key" "k == 'nvidia.com/gpu'" -}}
{{ include "cardwise.cel.annotated" "cardwise.dev/rewritten" }} ||
[object{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.containersHave" $bare }})
{{- if eq .root.Values.webhook.nvidiaGpu "take" }} ||
([object{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.containersHave" $nvidia }}) &&
 !(oldObject != null && [oldObject{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.containersHave" $nvidia }})))
{{- end }}
{{- end }}

{{/* Whether the `object` has the annotation. */}}
{{- define "cardwise.cel.annotated" -}}
(has(object.metadata.annotations) && '{{ . }}' in object.metadata.annotations)
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
k.startsWith('ALIYUN_COM_GPU_MEM_') || k.startsWith('scheduler.framework.gpushare.allocation') || (k.startsWith('cardwise.dev/') && !(k in ['cardwise.dev/policy', 'cardwise.dev/one-best-node', 'cardwise.dev/defaults', 'cardwise.dev/class']))
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
