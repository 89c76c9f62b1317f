{{/* The labels of a part of the run: (dict "run" NAME "part" PART). */}}
{{- define "offbeat.labels" -}}
app.kubernetes.io/name: offbeat
app.kubernetes.io/instance: {{ .run }}
{{- if .part }}
app.kubernetes.io/component: {{ .part }}
{{- end }}
{{- end }}

{{/* Name and labels of an object: (dict "run" NAME "name" OBJECT "part" PART). */}}
{{- define "offbeat.metadata" -}}
metadata:
  name: {{ .name }}
  labels:
    {{- include "offbeat.labels" . | nindent 4 }}
{{- end }}

{{/* Requests and limits: (dict "cpus" "memory" "gpus" "gpu_resource"). */}}
{{- define "offbeat.resources" -}}
{{- $requests := dict }}
{{- $limits := dict }}
{{- if .cpus }}{{ $_ := set $requests "cpu" (toString .cpus) }}{{ end }}
{{- if .memory }}{{ $_ := set $requests "memory" (toString .memory) }}{{ $_ := set $limits "memory" (toString .memory) }}{{ end }}
{{- if .gpus }}{{ $_ := set $limits .gpu_resource (toString .gpus) }}{{ end }}
{{- $resources := dict }}
{{- if $requests }}{{ $_ := set $resources "requests" $requests }}{{ end }}
{{- if $limits }}{{ $_ := set $resources "limits" $limits }}{{ end }}
{{- toYaml $resources }}
{{- end }}

{{/* A readiness probe by the broker's /status: (dict "run" "kind"). */}}
{{- define "offbeat.probe" -}}
exec:
  command: [python, -m, launch.fleet.probe, {{ .kind }}, /work/runs/{{ .run }}]
periodSeconds: 20
timeoutSeconds: 15
failureThreshold: 3
{{- end }}

{{/* Lines with which a script begins: they note what a file holds: (dict "file"). */}}
{{- define "offbeat.looks_at" -}}
mkdir -p "$HOME"
rm -f "$HOME/over"
file={{ .file }} rc=0
before=$(cksum <"$file")
# The process drains at SIGTERM, so the shell hands it on, and waits.
trap 'kill -TERM $! 2>/dev/null || exit 75' TERM
{{- end }}

{{/* Line of a script that waits for the process in the background. A signal interrupts `wait`. */}}
{{- define "offbeat.waits" -}}
while kill -0 $! 2>/dev/null; do wait $!; rc=$?; done
{{- end }}

{{/* Lines of a script that end as the process has, or stay until that file is another one: (dict "over" WORDS). */}}
{{- define "offbeat.stays" -}}
case $rc in 0 | 65) ;; *) exit $rc ;; esac
# Kubernetes would start this container again, whatever its exit code, and load all of it.
trap - TERM
echo "nothing is left to do (code $rc): {{ .over }}" >"$HOME/over"
cat "$HOME/over"
while [ "$(cksum <"$file")" = "$before" ]; do sleep 15; done
exit 75
{{- end }}

{{/* The pod of a part: (dict "values" VALUES "part" "shm" "grace_s" "nodes" "container"). */}}
{{- define "offbeat.pod" -}}
{{- $values := .values }}
{{- $name := printf "offbeat-%s" $values.run }}
{{- $host := ne .part "head" }}
metadata:
  labels:
    {{- include "offbeat.labels" (dict "run" $values.run "part" .part) | nindent 4 }}
spec:
  serviceAccountName: {{ $name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace_s }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: offbeat
      image: {{ required "image: name the image of `make image` in your registry" $values.image | quote }}
      workingDir: /work
      env:
        - {name: HOME, value: /work/home}
        {{- if $host }}
        - {name: OFFBEAT_TICKET, value: /run/offbeat/ticket}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- end }}
      {{- if $values.env_secret }}
      envFrom:
        - secretRef: {name: {{ $values.env_secret }}}
      {{- end }}
      {{- .container | nindent 6 }}
      volumeMounts:
        - {name: config, mountPath: /config, readOnly: true}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: temporary, mountPath: /tmp}
        - {name: work, mountPath: /work}
        {{- if $host }}
        - {name: ticket, mountPath: /run/offbeat, readOnly: true}
        {{- end }}
        {{- if $values.data_claim }}
        - {name: data, mountPath: /data, readOnly: true}
        {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      terminationMessagePolicy: FallbackToLogsOnError
  volumes:
    - {name: config, configMap: {name: {{ $name }}-run}}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ .shm | quote }}}}
    - {name: temporary, emptyDir: {}}
    {{- if $host }}
    - {name: work, emptyDir: {}}
    - {name: ticket, secret: {secretName: {{ $name }}-{{ .part }}-ticket, defaultMode: 288}}
    {{- end }}
    {{- if $values.data_claim }}
    - {name: data, persistentVolumeClaim: {claimName: {{ $values.data_claim }}, readOnly: true}}
    {{- end }}
  {{- $tolerated := ternary $values.tolerations $values.head_tolerations $host }}
  {{- if or $host $tolerated }}
  tolerations:
    {{- range $tolerated }}
    - {key: {{ . }}, operator: Exists}
    {{- end }}
    {{- if $host }}
    - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    {{- end }}
  {{- end }}
  {{- with .nodes }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $values.pull_secret }}
  imagePullSecrets:
    - name: {{ $values.pull_secret }}
  {{- end }}
{{- end }}
