{{/* The ServiceAccount of a component. */}}
{{- define "cardwise.account" }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: cardwise-{{ .component }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The beginning of a ClusterRole; the rules follow. `name`: its name. `extra`: more labels. */}}
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

{{/*
Binds a role to the ServiceAccount of a component: with a `namespace` a Role, without one a ClusterRole. `name`: the
name of the binding, if it is not the role's.
*/}}
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
subjects: {{- include "cardwise.subject" (dict "root" .root "name" (printf "cardwise-%s" .component)) | nindent 2 }}
{{- end }}

{{/*
A Role that allows a component these `verbs` on one `object` of a `resource` in Cardwise's namespace. RBAC cannot limit
`create` to a name.
*/}}
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
