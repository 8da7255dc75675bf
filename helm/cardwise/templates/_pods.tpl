{{/* What our pods have in common. `part` is the component's values. */}}
{{- define "cardwise.pod.common" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
nodeSelector: {{- include "cardwise.pod.linux" .part.nodeSelector | nindent 2 }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The labels `.` that a node must have, and that of Linux: a cluster may have Windows nodes, which cannot run our image. */}}
{{- define "cardwise.pod.linux" -}}
{{- merge (dict) (. | default dict) (dict "kubernetes.io/os" "linux") | toYaml }}
{{- end }}

{{/* Replicas on different nodes, where there are as many. */}}
{{- define "cardwise.pod.apart" -}}
affinity:
  {{- with .part.affinity }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "cardwise.selector" . | nindent 14 }}
  {{- end }}
{{- end }}

{{/* Labels by which others mark nodes with NVIDIA's GPUs, with the values that mean one; none: any value. JSON. */}}
{{- define "cardwise.nodes.labels" -}}
{"nvidia.com/gpu.present": ["true"],
 "feature.node.kubernetes.io/pci-10de.present": ["true"],
 "feature.node.kubernetes.io/pci-0302_10de.present": ["true"],
 "feature.node.kubernetes.io/pci-0300_10de.present": ["true"],
 "cloud.google.com/gke-accelerator": [],
 "k8s.amazonaws.com/accelerator": [],
 "kubernetes.azure.com/accelerator": ["nvidia"]}
{{- end }}

{{/*
Pods of the nodes with cards; labels that an admin names instead come by nodeSelector ("cardwise.pod.common"). They leave
a node while NVIDIA's GPU Operator replaces its driver, because they hold the driver's kernel module. From 26.7 on its
driver manager says so by gpu.deploy.client; before, the state of the upgrade does, once the node has been drained.
*/}}
{{- define "cardwise.pod.onNodes" -}}
{{- $terms := list }}
{{- if .Values.nodes.selector }}
{{- $terms = list list }}
{{- else }}
{{- range $key, $values := include "cardwise.nodes.labels" . | fromJson }}
{{- $label := ternary (dict "operator" "In" "values" $values) (dict "operator" "Exists") (not (empty $values)) }}
{{- $terms = append $terms (list (merge (dict "key" $key) $label)) }}
{{- end }}
{{- end }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- range $terms }}
        - matchExpressions:
            {{- range . }}
            - {{ toJson . }}
            {{- end }}
            - {key: nvidia.com/gpu.deploy.client, operator: NotIn, values: [paused-for-driver-upgrade]}
            - {key: nvidia.com/gpu-driver-upgrade-state, operator: NotIn, values: [pod-restart-required]}
        {{- end }}
{{- with .Values.nodes.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "cardwise.nodes.runtimeClass" . }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* As Pod Security's profile "restricted" requires; none of these containers writes to its own disk. */}}
{{- define "cardwise.pod.restricted" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "cardwise.container.restricted" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The end of its log is the message of a container that ends with an error: `cardwise doctor` shows it. */}}
{{- define "cardwise.container.image" -}}
image: {{ include "cardwise.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "cardwise.container.logging" -}}
- --log-level={{ .Values.logLevel }}
- --log-format={{ .Values.logFormat }}
{{- end }}

{{/* Which node it is on, and NVIDIA's driver, which the runtime brings by these. */}}
{{- define "cardwise.container.nodeEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if not .Values.nodes.simulatedGPUs }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
{{- end }}
{{- end }}

{{/*
Of the plain port of every part. A part that hangs is ended after half a minute. "quick": a part that stands still leaves
its Service within three seconds, since each call that still reaches it holds up kube-scheduler for a second.
*/}}
{{- define "cardwise.container.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 1
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: {{ if .quick }}1{{ else }}2{{ end }}
  timeoutSeconds: {{ if .quick }}1{{ else }}3{{ end }}
  failureThreshold: 2
{{- end }}
