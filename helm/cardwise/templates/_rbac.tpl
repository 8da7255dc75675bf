{{/* The account of a component. */}}
{{- define "cardwise.account" }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .account | quote }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The ClusterRole of this name, up to its rules. `extra`: labels besides. */}}
{{- define "cardwise.clusterRole" }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ .role }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
    {{- with .extra }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .annotations }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
rules:
{{- end }}

{{/* Gives the account of a component a Role of a `namespace`, or without one a ClusterRole. `name`, if not the role's. */}}
{{- define "cardwise.bound" }}
{{- $kind := ternary "Role" "ClusterRole" (not (empty .namespace)) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ .name | default .role }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ .role }}
subjects: {{- include "cardwise.subject" (dict "root" .root "name" .account) | nindent 2 }}
{{- end }}

{{/* The right of a component to keep one `object` of a `resource` in our namespace, by `verbs`. `create` cannot be limited
to a name. */}}
{{- define "cardwise.ownObject" }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .role }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
rules:
  - apiGroups: [{{ .group | quote }}]
    resources: [{{ .resource }}]
    verbs: [create]
  - apiGroups: [{{ .group | quote }}]
    resources: [{{ .resource }}]
    resourceNames: [{{ .object | quote }}]
    verbs: [{{ join ", " .verbs }}]
{{- include "cardwise.bound" (merge (dict "namespace" (include "cardwise.namespace" .root)) .) }}
{{- end }}
