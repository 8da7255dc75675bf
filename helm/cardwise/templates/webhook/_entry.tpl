{{/*
Fields that all entries of both webhook configurations have. The caBundle is missing, because the webhook writes it.
*/}}
{{- define "cardwise.webhook.entry" -}}
admissionReviewVersions: [v1]
sideEffects: None
matchPolicy: Equivalent
failurePolicy: {{ .failurePolicy | default "Fail" }}
timeoutSeconds: {{ .timeoutSeconds | default .root.Values.webhook.timeoutSeconds }}
clientConfig:
  {{- if .root.Values.webhook.url }}
  url: {{ .root.Values.webhook.url }}{{ .path }}
  {{- else }}
  service:
    name: cardwise-webhook
    namespace: {{ include "cardwise.namespace" .root | quote }}
    port: 443
    path: {{ .path }}
  {{- end }}
{{- end }}

{{/*
An entry for which the unit of gpu-mem numbers matters. A label of the namespace sets the unit, and the API server
evaluates this label. So each such entry exists twice, and an object matches one of the two. `.other`: the entry for
namespaces with another unit than webhook.gpuMemUnit. `.labels`: more labels that the namespaces must have.
*/}}
{{- define "cardwise.webhook.entryByUnit" -}}
{{- $other := eq .root.Values.webhook.gpuMemUnit "GiB" | ternary "MiB" "GiB" -}}
{{- $path := include "cardwise.webhook.unit" . | eq "GiB" | ternary (print .path "/gib") .path -}}
- name: {{ .name }}{{ if .other }}-of-other-unit{{ end }}.cardwise.dev
  {{- include "cardwise.webhook.entry" (merge (dict "path" $path) .) | nindent 2 }}
  namespaceSelector:
    matchExpressions:
      - {key: cardwise.dev/gpu-mem-unit, operator: {{ .other | ternary "In" "NotIn" }}, values: [{{ $other }}]}
    {{- with .labels }}
    matchLabels: {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}

{{/* The unit of numbers without a unit in the namespaces of the entry. */}}
{{- define "cardwise.webhook.unit" -}}
{{- $default := .root.Values.webhook.gpuMemUnit -}}
{{- if .other }}{{ eq $default "GiB" | ternary "MiB" "GiB" }}{{ else }}{{ $default }}{{ end -}}
{{- end }}

{{- define "cardwise.webhook.notExempt" -}}
- name: not-exempt
  expression: "!(request.namespace in {{ include "cardwise.cel.list" (include "cardwise.withOwn" (dict "root" . "list" .Values.webhook.exemptNamespaces) | fromJsonArray) }})"
{{- end }}

{{/* An object that is being deleted must not depend on the webhook: its last update removes a finalizer. */}}
{{- define "cardwise.webhook.notBeingDeleted" -}}
- name: not-being-deleted
  expression: "!has(object.metadata.deletionTimestamp)"
{{- end }}

{{- define "cardwise.webhook.podConditions" -}}
{{ include "cardwise.webhook.notExempt" . }}
- name: not-a-mirror
  expression: {{ include "cardwise.cel.notMirror" . | quote }}
{{- end }}

{{/* Conditions of the entries that rewrite workloads. `path`: the path of the template's pod spec, in CEL. */}}
{{- define "cardwise.webhook.templateConditions" -}}
{{ include "cardwise.webhook.notExempt" .root }}
{{ include "cardwise.webhook.notBeingDeleted" . }}
- name: asks-by-a-name-to-rewrite
  expression: |-
    {{- if .late }}
    {{- include "cardwise.cel.templateNeedsRewrite" . | nindent 4 }}
    {{- else }}
    {{- include "cardwise.cel.templateIsOurs" . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Conditions of the entries that validate workloads with gangs. `path`: the path of the pod template, in CEL. */}}
{{- define "cardwise.webhook.gangConditions" -}}
{{ include "cardwise.webhook.notExempt" .root }}
{{ include "cardwise.webhook.notBeingDeleted" . }}
- name: changes
  expression: "oldObject == null || object.spec != oldObject.spec"
- name: makes-a-gang
  expression: |-
    [object{{ .path }}.orValue({})].exists(t,
    {{- include "cardwise.cel.namesGang" (dict "root" .root "of" "t") | nindent 4 }})
{{- end }}

{{/*
Conditions of the entries that warn about workloads. `path`: the path of the pod template, in CEL; empty if unknown.
*/}}
{{- define "cardwise.webhook.adviceConditions" -}}
{{ include "cardwise.webhook.notExempt" .root }}
{{ include "cardwise.webhook.notBeingDeleted" . }}
- name: changes
  expression: "oldObject == null || object.?spec != oldObject.?spec"
- name: no-controller-made-it
  expression: "!(true in object.metadata.?ownerReferences.orValue([]).map(o, o.?controller.orValue(false)))"
{{- with .path }}
- name: asks-for-cards
  expression: |-
    [object{{ . }}.?metadata.?annotations.orValue({})].exists(a, 'cardwise.dev/class' in a) ||
    [object{{ . }}.?spec.orValue({})].exists(s,
    {{- include "cardwise.cel.amountsAre" (dict "spec" "s" "holds" (include "cardwise.cel.looksLikeGpu" $.root)) | nindent 4 }}) ||
    {{- include "cardwise.cel.keysAboutUs" (dict "annotations" (printf "object%s.?metadata.?annotations.orValue({})" .) "labels" (printf "object%s.?metadata.?labels.orValue({})" .)) | nindent 4 }}
{{- end }}
{{- end }}
