{{/* Labels of every object; `component` is the part it belongs to. */}}
{{- define "cardwise.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{ include "cardwise.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: cardwise
{{- end }}

{{/* By which Services and workloads know the pods of a component: what no upgrade changes. */}}
{{- define "cardwise.selector" -}}
app.kubernetes.io/name: cardwise
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Where Cardwise lives. */}}
{{- define "cardwise.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{/* A user name as the API server knows a ServiceAccount of ours. */}}
{{- define "cardwise.user" -}}
system:serviceaccount:{{ include "cardwise.namespace" .root }}:{{ .name }}
{{- end }}

{{/* Subject of our role bindings. */}}
{{- define "cardwise.subject" -}}
- kind: ServiceAccount
  name: {{ .name | quote }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
{{- end }}

{{/* Namespaces of the values and our own, as a JSON list: whatever it is called, our pods are never kept waiting by us. */}}
{{- define "cardwise.withOwn" -}}
{{ append .list (include "cardwise.namespace" .root) | uniq | toJson }}
{{- end }}

{{/* Schedulers that ask the extender, as a JSON list. */}}
{{- define "cardwise.gangSchedulers" -}}
{{- $found := .Values.webhook.gangSchedulers -}}
{{- if eq .Values.scheduler.mode "own" }}{{ $found = append $found .Values.scheduler.name }}{{ end -}}
{{ $found | uniq | toJson }}
{{- end }}

{{/* The image of all parts. */}}
{{- define "cardwise.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Users whose Bindings the webhook does not look at, as a JSON list. */}}
{{- define "cardwise.binders" -}}
{{- $found := prepend .Values.bindings.allowedUsers (include "cardwise.user" (dict "root" . "name" .Values.extender.serviceAccount.name)) -}}
{{- if eq .Values.scheduler.mode "own" }}{{ $found = append $found (include "cardwise.user" (dict "root" . "name" "cardwise-scheduler")) }}{{ end -}}
{{ $found | uniq | toJson }}
{{- end }}
