{{/* The labels of every object; `component` is the component that the object belongs to. */}}
{{- define "cardwise.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{ include "cardwise.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: cardwise
{{- end }}

{{/* The labels by which Services and workloads select the pods of a component. No upgrade may change them. */}}
{{- define "cardwise.selector" -}}
app.kubernetes.io/name: cardwise
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The namespace of Cardwise. */}}
{{- define "cardwise.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{/* The user name of one of Cardwise's ServiceAccounts. */}}
{{- define "cardwise.user" -}}
system:serviceaccount:{{ include "cardwise.namespace" .root }}:{{ .name }}
{{- end }}

{{/* The subject of Cardwise's role bindings. */}}
{{- define "cardwise.subject" -}}
- kind: ServiceAccount
  name: {{ .name | quote }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
{{- end }}

{{/*
The namespaces of a value and Cardwise's own, as a JSON list: Cardwise's pods must never wait for Cardwise itself.
*/}}
{{- define "cardwise.withOwn" -}}
{{ append .list (include "cardwise.namespace" .root) | uniq | toJson }}
{{- end }}

{{/* The schedulers that call the extender, as a JSON list. */}}
{{- define "cardwise.gangSchedulers" -}}
{{- $found := .Values.webhook.gangSchedulers -}}
{{- if eq .Values.scheduler.mode "own" }}{{ $found = append $found .Values.scheduler.name }}{{ end -}}
{{ $found | uniq | toJson }}
{{- end }}

{{/* The image of all components. */}}
{{- define "cardwise.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* The users whose Bindings the webhook does not check, as a JSON list. */}}
{{- define "cardwise.binders" -}}
{{- $found := prepend .Values.bindings.allowedUsers (include "cardwise.user" (dict "root" . "name" "cardwise-extender")) -}}
{{- if eq .Values.scheduler.mode "own" }}{{ $found = append $found (include "cardwise.user" (dict "root" . "name" "cardwise-scheduler")) }}{{ end -}}
{{ $found | uniq | toJson }}
{{- end }}
