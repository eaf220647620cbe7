{{- define "reasoner.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "reasoner.image" -}}
{{- .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .root.Chart.AppVersion .image.tag }}{{ end -}}
{{- end }}

{{- define "reasoner.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "reasoner.labels" -}}
{{ include "reasoner.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "reasoner.secretName" -}}
{{- default (include "reasoner.name" .) .Values.secrets.existing -}}
{{- end }}

{{- define "reasoner.secretEnv" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ include "reasoner.secretName" .root }}, key: {{ .key }}{{ if .optional }}, optional: true{{ end }}}}
{{- end }}

{{- define "reasoner.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "reasoner.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Addresses of the engines: each replica by its own name, which decides what jobs it gets. */ -}}
{{- define "reasoner.engineUrls" -}}
{{- $urls := .Values.engine.urls -}}
{{- if .Values.engine.enabled -}}
{{- $name := printf "%s-engine" (include "reasoner.name" .) -}}
{{- range $i := until (int .Values.engine.replicas) -}}
{{- $urls = append $urls (printf "http://%s-%d.%s:8100" $name $i $name) -}}
{{- end -}}
{{- end -}}
{{- required "engine.enabled is false: name the engines elsewhere in engine.urls" (join "," $urls) -}}
{{- end }}

{{- define "reasoner.redisAddress" -}}
{{- if .Values.valkey.enabled -}}
redis://%s:$(REDIS_PASSWORD)@{{ include "reasoner.name" . }}-valkey:6379/0
{{- else -}}
{{ .Values.valkey.tls | ternary "rediss" "redis" }}://%s:$(REDIS_PASSWORD)@{{ required "valkey.enabled is false: give the address of another one in valkey.address" .Values.valkey.address }}/0
{{- end -}}
{{- end }}

{{- /* Settings that all roles have in common. */ -}}
{{- define "reasoner.commonEnv" -}}
{{- with .Values.model }}
- {name: REASONER_MODEL, value: {{ . | quote }}}
{{- end }}
{{- with .Values.prm }}
- {name: REASONER_PRM, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := .Values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- /* Settings of a role that reads and writes jobs; .user is its user of Redis. */ -}}
{{- define "reasoner.jobsEnv" -}}
{{ include "reasoner.secretEnv" (dict "root" .root "name" "REDIS_PASSWORD" "key" (printf "redis-%s-password" .user)) }}
- {name: REASONER_REDIS_URL, value: {{ printf (include "reasoner.redisAddress" .root) .user | quote }}}
- {name: REASONER_ENGINE_URL, value: {{ include "reasoner.engineUrls" .root | quote }}}
{{ include "reasoner.secretEnv" (dict "root" .root "name" "REASONER_ARCHIVE_URL" "key" "archive-url" "optional" true) }}
{{ include "reasoner.secretEnv" (dict "root" .root "name" "REASONER_WEBHOOK_SECRET" "key" "webhook-secret" "optional" true) }}
{{- include "reasoner.commonEnv" .root }}
{{- end }}

{{- /* The root file system is read-only: /tmp can be written, reasoner.toml is read from the working folder. */ -}}
{{- define "reasoner.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/reasoner, readOnly: true}
{{- if .Values.models.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "reasoner.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 1Gi}}
- {name: config, secret: {secretName: {{ include "reasoner.name" . }}-config}}
{{- with .Values.models.claim }}
- {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- end }}

{{- define "reasoner.podDefaults" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ include "reasoner.podSecurity" . | nindent 2 }}
{{- end }}
