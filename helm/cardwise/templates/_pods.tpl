{{/* Fields that all pods of Cardwise have. `settings`: the values of the component. */}}
{{- define "cardwise.pod.common" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
nodeSelector: {{- include "cardwise.pod.linux" .settings.nodeSelector | nindent 2 }}
{{- with .settings.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The node selector with the labels `.` and the label of Linux: a cluster may have Windows nodes, which cannot run the
image.
*/}}
{{- define "cardwise.pod.linux" -}}
{{- merge (dict) (. | default dict) (dict "kubernetes.io/os" "linux") | toYaml }}
{{- end }}

{{/* The affinity by which replicas prefer different nodes. */}}
{{- define "cardwise.pod.apart" -}}
affinity:
  {{- with .settings.affinity }}
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

{{/*
Labels by which other programs mark nodes with NVIDIA's GPUs, as JSON. Each has a list of values; an empty list: any
value.
*/}}
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
The affinity of the components on GPU nodes. If an administrator names labels in nodes.selector, "cardwise.pod.common"
writes them as nodeSelector instead. The components leave a node while NVIDIA's GPU Operator replaces its driver, because
they keep the driver's kernel module in use. Version 26.7 and later of the operator announce this by the label
gpu.deploy.client. With earlier versions the components leave when the label of the upgrade's state shows that the node is
drained.
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

{{/*
The security context that Pod Security's profile "restricted" requires. These containers do not write to their own disk.
*/}}
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

{{/* A container that fails gets the end of its log as its termination message, which `cardwise doctor` shows. */}}
{{- define "cardwise.container.image" -}}
image: {{ include "cardwise.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "cardwise.container.logging" -}}
- --log-level={{ .Values.logLevel }}
- --log-format={{ .Values.logFormat }}
{{- end }}

{{/*
Environment variables with the node's name, and those by which NVIDIA's runtime gives the container the driver.
*/}}
{{- define "cardwise.container.nodeEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if not .Values.nodes.simulatedGPUs }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
{{- end }}
{{- end }}

{{/*
Probes on the port for metrics and health checks, which every component has. A component that hangs is restarted after half a
minute. "quick": a component that hangs leaves its Service within three seconds, because each call to it delays
kube-scheduler by a second.
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
